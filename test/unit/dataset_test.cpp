#include "io/dataset.h"

#include <hdf5.h>
#include <sys/resource.h>

#include <csignal>
#include <numeric>
#include <optional>
#include <set>

#include "files.h"
#include "io/hdf5_file.h"

namespace qshard {
namespace {

constexpr int64_t kQwenVocab = 151936;

// An llm.c file: 256 int32 of header, then the tokens.
template <typename T>
std::string llmc(int32_t magic, int32_t version, int32_t count, const std::vector<T>& ids) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return bytes_of(header) + bytes_of(ids);
}

struct DatasetTest : testing::Test {
  TokenFile write_tokens(const std::vector<uint32_t>& ids, int64_t vocab = kQwenVocab) {
    TokenFileWriter writer(dir / "t.h5", "test", vocab, "somewhere");
    writer.add_document(ids);
    writer.finish();
    return TokenFile(dir / "t.h5");
  }
  TokenFile raw(const std::vector<uint32_t>& ids) {
    write_text(dir / "raw.bin", bytes_of(ids));
    return TokenFile(dir / "raw.bin", "raw-u32");
  }
  TokenFile raw_of_size(int64_t n) {
    std::vector<uint32_t> ids(static_cast<size_t>(n));
    std::iota(ids.begin(), ids.end(), 0u);
    return raw(ids);
  }
  std::string open_error(const std::string& content, const std::string& format = "auto") {
    write_text(dir / "bad.bin", content);
    const std::string message = error_of([&] { TokenFile(dir / "bad.bin", format); });
    EXPECT_TRUE(has(message, {dir / "bad.bin"}));
    return message;
  }
  // Writes a token file that `change` may spoil before it is closed.
  std::string hdf5_error(const std::function<void(Hdf5File&)>& write) {
    {
      Hdf5File file = Hdf5File::create(dir / "bad.h5");
      write(file);
      file.close();
    }
    const std::string message = error_of([&] { TokenFile(dir / "bad.h5"); });
    EXPECT_TRUE(has(message, {dir / "bad.h5"}));
    return message;
  }
  static void write_header(Hdf5File& file, const std::string& format = "qshard-tokens",
                           int64_t version = 1, int64_t vocab = 300) {
    file.write_attribute("format", format);
    file.write_attribute("version", version);
    file.write_attribute("vocab_size", vocab);
  }
  static void write_datasets(Hdf5File& file, const std::vector<uint64_t>& offsets) {
    file.create_dataset("/tokens", Hdf5Type::u32, {10});
    file.write<uint32_t>("/tokens", 0, std::vector<uint32_t>(10, 1));
    file.create_dataset("/document_offsets", Hdf5Type::u64, {static_cast<int64_t>(offsets.size())});
    file.write<uint64_t>("/document_offsets", 0, offsets);
  }
  TempDir dir;
};

std::vector<int32_t> read_all(const TokenFile& file, int64_t vocab) {
  std::vector<int32_t> ids(static_cast<size_t>(file.info().tokens));
  file.read(0, file.info().tokens, vocab, ids.data());
  return ids;
}

// --- formats

TEST_F(DatasetTest, IdsBeyond16BitsSurvive) {
  const TokenFile file = write_tokens({0, 65535, 65536, 151643});
  EXPECT_EQ(read_all(file, kQwenVocab), (std::vector<int32_t>{0, 65535, 65536, 151643}));
  EXPECT_EQ(file.info().format, "hdf5");
  EXPECT_EQ(file.info().tokenizer, "test");
  EXPECT_EQ(file.info().source, "somewhere");
  EXPECT_EQ(file.info().vocab_size, kQwenVocab);
  EXPECT_EQ(file.info().width, 4);
}

TEST_F(DatasetTest, LlmcFiles) {
  write_text(dir / "a", llmc<uint16_t>(20240520, 1, 3, {1, 50256, 65535}));
  const TokenFile gpt2(dir / "a");
  EXPECT_EQ(gpt2.info().format, "llmc-gpt2");
  EXPECT_EQ(gpt2.info().width, 2);
  EXPECT_EQ(gpt2.info().data_offset, 1024);
  EXPECT_EQ(read_all(gpt2, kQwenVocab), (std::vector<int32_t>{1, 50256, 65535}));
  EXPECT_TRUE(gpt2.document_offsets().empty());
  write_text(dir / "b", llmc<uint32_t>(20240801, 7, 2, {128000, 5}));
  const TokenFile llama3(dir / "b");
  EXPECT_EQ(llama3.info().format, "llmc-llama3");
  EXPECT_EQ(read_all(llama3, 128256), (std::vector<int32_t>{128000, 5}));
}

TEST_F(DatasetTest, RawFilesOnlyWhenAskedFor) {
  const std::string content = bytes_of<uint16_t>({1, 2, 65535});
  EXPECT_TRUE(has(open_error(content), {"not a token file", "01 00 02 00 ff ff", "raw-u16"}));
  const TokenFile file(dir / "bad.bin", "raw-u16");
  EXPECT_EQ(read_all(file, 65536), (std::vector<int32_t>{1, 2, 65535}));
  error_of([&] { TokenFile(dir / "bad.bin", "u16"); }, kExitUsage);
}

TEST_F(DatasetTest, DamagedLlmcFiles) {
  const std::vector<uint16_t> ids = {1, 2, 3};
  EXPECT_TRUE(has(open_error(llmc(20240521, 1, 3, ids)), {"20240520", "20240801", "not a token"}));
  EXPECT_TRUE(has(open_error(llmc(20240520, 2, 3, ids)), {"version 2", "reads version 1"}));
  EXPECT_TRUE(has(open_error(llmc(20240520, 1, 4, ids)),
                  {"4 tokens of 2 bytes", "expected a file of 1032 bytes, found 1030"}));
  EXPECT_TRUE(has(open_error(llmc(20240520, 1, 2, ids)), {"1028", "1030"}));
  EXPECT_TRUE(has(open_error(llmc(20240520, 1, 3, ids) + "x"), {"1030", "1031"}));
  EXPECT_TRUE(has(open_error(llmc(20240520, 1, 0, std::vector<uint16_t>{})), {"tokens 0"}));
  EXPECT_TRUE(has(open_error(llmc(20240520, 1, -3, ids)), {"tokens -3"}));
  EXPECT_TRUE(has(open_error(llmc(20240520, 1, 3, ids).substr(0, 1000)), {"1000 bytes", "1024"}));
  EXPECT_TRUE(has(open_error(llmc(20240520, 1, 3, ids), "llmc-llama3"), {"20240520", "20240801"}));
  // GPT-2's 16-bit magic with 32-bit ids is caught by the size.
  EXPECT_TRUE(has(open_error(llmc<uint32_t>(20240520, 1, 2, {1, 2})), {"1028", "1032"}));
}

TEST_F(DatasetTest, DamagedRawFiles) {
  EXPECT_TRUE(has(open_error(""), {"empty file"}));
  EXPECT_TRUE(has(open_error("", "raw-u16"), {"empty file"}));
  EXPECT_TRUE(has(open_error("123", "raw-u16"), {"3 bytes", "multiple of the 2"}));
  EXPECT_TRUE(has(open_error("123456", "raw-u32"), {"6 bytes", "multiple of the 4"}));
  EXPECT_TRUE(has(open_error("abc"), {"61 62 63"}));
  EXPECT_TRUE(has(error_of([&] { TokenFile(dir / "absent"); }), {"No such file"}));
  EXPECT_TRUE(has(error_of([&] { TokenFile(dir / "."); }), {"not a regular file"}));
}

TEST_F(DatasetTest, DamagedHdf5Files) {
  write_tokens(std::vector<uint32_t>(5000, 1));
  const std::string good = read_text(dir / "t.h5");
  EXPECT_TRUE(has(open_error(good.substr(0, good.size() - 1000)), {"truncated"}));
  EXPECT_TRUE(has(open_error(good.substr(0, 20)), {"HDF5"}));
  EXPECT_TRUE(has(hdf5_error([](Hdf5File&) {}), {"attribute format is missing"}));
  EXPECT_TRUE(has(hdf5_error([](Hdf5File& f) { write_header(f, "other"); }),
                  {"format = \"other\"", "qshard-tokens"}));
  EXPECT_TRUE(has(hdf5_error([](Hdf5File& f) { write_header(f, "qshard-tokens", 2); }),
                  {"version = 2", "reads version 1"}));
  EXPECT_TRUE(has(hdf5_error([](Hdf5File& f) { write_header(f, "qshard-tokens", 1, 0); }),
                  {"vocab_size = 0"}));
  EXPECT_TRUE(has(hdf5_error([](Hdf5File& f) { write_header(f); }), {"/tokens is missing"}));
  EXPECT_TRUE(has(hdf5_error([](Hdf5File& f) {
                    write_header(f);
                    f.create_dataset("/tokens", Hdf5Type::u32, {10});
                  }),
                  {"/document_offsets is missing"}));
}

TEST_F(DatasetTest, Hdf5DatasetsOfTheWrongKind) {
  EXPECT_TRUE(has(hdf5_error([](Hdf5File& f) {
                    write_header(f);
                    f.create_dataset("/tokens", Hdf5Type::u16, {10});
                    f.create_dataset("/document_offsets", Hdf5Type::u64, {1});
                  }),
                  {"/tokens has type u16 and 1", "expected u32"}));
  EXPECT_TRUE(has(hdf5_error([](Hdf5File& f) {
                    write_header(f);
                    f.create_dataset("/tokens", Hdf5Type::u32, {5, 2});
                    f.create_dataset("/document_offsets", Hdf5Type::u64, {1});
                  }),
                  {"2 dimension(s)"}));
  EXPECT_TRUE(has(hdf5_error([](Hdf5File& f) {
                    write_header(f);
                    f.create_dataset("/tokens", Hdf5Type::u32, {0});
                    f.create_dataset("/document_offsets", Hdf5Type::u64, {1});
                  }),
                  {"/tokens has no elements"}));
}

// A token file as other programs write it: HDF5's default layouts, texts of variable length.
void write_foreign_file(const std::string& path, hid_t token_type, hsize_t chunk,
                        unsigned deflate) {
  const hid_t file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  const hid_t scalar = H5Screate(H5S_SCALAR), text = H5Tcopy(H5T_C_S1);
  H5Tset_size(text, H5T_VARIABLE);
  const char* format = "qshard-tokens";
  const int64_t version = 1, vocab = 300;
  const auto attribute = [&](const char* name, hid_t type, const void* value) {
    const hid_t id = H5Acreate2(file, name, type, scalar, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(id, type, value);
    H5Aclose(id);
  };
  attribute("format", text, &format);
  attribute("version", H5T_NATIVE_INT64, &version);
  attribute("vocab_size", H5T_NATIVE_INT64, &vocab);
  const auto dataset = [&](const char* name, hid_t type, hid_t memory, const void* data, hsize_t n,
                           hid_t properties) {
    const hid_t space = H5Screate_simple(1, &n, nullptr);
    const hid_t id = H5Dcreate2(file, name, type, space, H5P_DEFAULT, properties, H5P_DEFAULT);
    H5Dwrite(id, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, data);
    H5Dclose(id);
    H5Sclose(space);
  };
  const hid_t layout = H5Pcreate(H5P_DATASET_CREATE);
  if (chunk > 0) H5Pset_chunk(layout, 1, &chunk);
  if (deflate > 0) H5Pset_deflate(layout, deflate);
  const std::vector<uint32_t> tokens(10, 7);
  const uint64_t offset = 0;
  dataset("tokens", token_type, H5T_NATIVE_UINT32, tokens.data(), 10, layout);
  dataset("document_offsets", H5T_STD_U64LE, H5T_NATIVE_UINT64, &offset, 1, H5P_DEFAULT);
  for (hid_t id : {layout, text, scalar}) H5Idec_ref(id);
  H5Fclose(file);
}

TEST_F(DatasetTest, FilesOfOtherHdf5Programs) {
  write_foreign_file(dir / "f.h5", H5T_STD_U32LE, 0, 0);
  const TokenFile file(dir / "f.h5");
  EXPECT_EQ(file.info().vocab_size, 300);
  EXPECT_EQ(file.info().tokenizer, "");
  EXPECT_EQ(read_all(file, 300), std::vector<int32_t>(10, 7));

  const auto refusal = [&] { return error_of([&] { TokenFile(dir / "f.h5"); }); };
  write_foreign_file(dir / "f.h5", H5T_STD_U32LE, 5, 0);
  EXPECT_TRUE(has(refusal(), {dir / "f.h5", "/tokens is stored chunked,", "h5repack"}));
  write_foreign_file(dir / "f.h5", H5T_STD_U32LE, 5, 1);
  EXPECT_TRUE(has(refusal(), {"/tokens is stored chunked, compressed", "h5repack"}));
  write_foreign_file(dir / "f.h5", H5T_STD_U32BE, 0, 0);
  EXPECT_TRUE(has(refusal(), {"type u32 big-endian", "expected u32"}));
  write_foreign_file(dir / "f.h5", H5T_STD_I64LE, 0, 0);
  EXPECT_TRUE(has(refusal(), {"type i64", "expected u32"}));
}

TEST_F(DatasetTest, DocumentOffsetsAreChecked) {
  const auto with_offsets = [&](std::vector<uint64_t> offsets) {
    return hdf5_error([&](Hdf5File& f) {
      write_header(f);
      write_datasets(f, offsets);
    });
  };
  EXPECT_TRUE(has(with_offsets({1, 5}), {"document 0 of 2 begins at token 1"}));
  EXPECT_TRUE(has(with_offsets({0, 5, 5}), {"document 2 of 3 begins at token 5", "at least 6"}));
  EXPECT_TRUE(has(with_offsets({0, 10}), {"document 1 of 2 begins at token 10"}));
  EXPECT_TRUE(has(with_offsets({}), {"/document_offsets has no elements"}));
  {
    Hdf5File file = Hdf5File::create(dir / "good.h5");
    write_header(file);
    write_datasets(file, {0, 3, 9});
    file.close();
  }
  EXPECT_EQ(TokenFile(dir / "good.h5").document_offsets(), (std::vector<int64_t>{0, 3, 9}));
}

// --- ids

TEST_F(DatasetTest, IdsAreCheckedWhenTheyAreRead) {
  const TokenFile file = raw({1, 2, 514, 515, 4});
  std::vector<int32_t> ids(5);
  EXPECT_NO_THROW(file.read(0, 3, 515, ids.data()));
  EXPECT_NO_THROW(file.read(0, 5, 516, ids.data()));
  EXPECT_TRUE(has(error_of([&] { file.read(2, 3, 515, ids.data()); }),
                  {dir / "raw.bin", "token 3 (byte 12", "is 515", "0 to 514"}));
  // The label of the last input counts as well: it is one of the T + 1 tokens that are read.
  EXPECT_TRUE(has(error_of([&] { file.read(1, 3, 515, ids.data()); }), {"token 3"}));
  EXPECT_NO_THROW(file.read(4, 1, 515, ids.data()));
}

TEST_F(DatasetTest, MinusOneIsNoId) {
  const TokenFile file = raw({7, 0xffffffffu});
  std::vector<int32_t> ids(2);
  EXPECT_TRUE(has(error_of([&] { file.read(0, 2, 2147483647, ids.data()); }),
                  {"token 1 (byte 4", "4294967295"}));
}

TEST_F(DatasetTest, BadIdInAnHdf5FileIsLocated) {
  const TokenFile file = write_tokens({1, 151935});
  EXPECT_EQ(read_all(file, kQwenVocab)[1], 151935);
  std::vector<int32_t> ids(2);
  const std::string byte = std::to_string(file.info().data_offset + 4);
  EXPECT_TRUE(has(error_of([&] { file.read(0, 2, 151935, ids.data()); }),
                  {"token 1 (byte " + byte, "is 151935", "it says vocab_size 151936"}));
}

TEST_F(DatasetTest, EveryPlaceOfABadIdIsFound) {
  constexpr int64_t kTokens = 100;  // not a multiple of any vector
  for (int64_t bad = 0; bad < kTokens; ++bad) {
    std::vector<uint32_t> ids(kTokens, 3);
    ids[static_cast<size_t>(bad)] = 9;
    const TokenFile file = raw(ids);
    std::vector<int32_t> to(kTokens);
    EXPECT_TRUE(has(error_of([&] { file.read(0, kTokens, 9, to.data()); }),
                    {fmt::format("token {} (byte {} ", bad, 4 * bad)}));
  }
}

TEST_F(DatasetTest, RangesOutsideTheFile) {
  const TokenFile file = raw({1, 2, 3});
  std::vector<int32_t> ids(4);
  EXPECT_TRUE(has(error_of([&] { file.read(1, 3, 9, ids.data()); }), {"[1, 4)", "3"}));
  error_of([&] { file.read(-1, 1, 9, ids.data()); });
  error_of([&] { file.read(0, 1, 0, ids.data()); });
  EXPECT_NO_THROW(file.read(3, 0, 9, ids.data()));
}

TEST_F(DatasetTest, MovedFileStaysMapped) {
  TokenFile first = raw({1, 2, 3});
  const TokenFile second = std::move(first);
  EXPECT_EQ(read_all(second, 9), (std::vector<int32_t>{1, 2, 3}));
}

// --- writing

TEST_F(DatasetTest, DocumentsOfAWriter) {
  TokenFileWriter writer(dir / "t.h5", "x", 100, "y");
  writer.add_document(std::vector<uint32_t>{1, 2, 3});
  writer.add_document({});  // not recorded
  writer.append(std::vector<uint32_t>{4});
  writer.append(std::vector<uint32_t>{5});
  writer.end_document();
  writer.append(std::vector<uint32_t>{6});  // ended by finish
  const TokenFileInfo info = writer.finish();
  EXPECT_EQ(info.tokens, 6);
  EXPECT_EQ(info.documents, 3);
  EXPECT_EQ(TokenFile(dir / "t.h5").document_offsets(), (std::vector<int64_t>{0, 3, 5}));
  EXPECT_EQ(dir.names(), std::vector<std::string>{"t.h5"});
}

TEST_F(DatasetTest, MoreTokensThanOnePieceOfTheWriter) {
  std::vector<uint32_t> ids((1 << 20) + 5);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint32_t>(i * 7919 % 150000);
  const std::vector<int32_t> read = read_all(write_tokens(ids), kQwenVocab);
  ASSERT_EQ(read.size(), ids.size());
  for (size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(read[i], static_cast<int32_t>(ids[i])) << i;
}

TEST_F(DatasetTest, WriterRefusesIdsThatDoNotFit) {
  TokenFileWriter writer(dir / "t.h5", "x", 100, "y");
  writer.add_document(std::vector<uint32_t>{1, 99});
  EXPECT_TRUE(has(error_of([&] {
                    writer.append(std::vector<uint32_t>{5, 100});
                  }),
                  {"token 3", "is 100", "0 to 99"}));
  error_of([&] { TokenFileWriter(dir / "t.h5", "x", 0, "y"); }, kExitUsage);
}

TEST_F(DatasetTest, WriterLeavesNothingWithoutFinish) {
  {
    TokenFileWriter writer(dir / "t.h5", "x", 100, "y");
    writer.add_document(std::vector<uint32_t>{1});
  }
  EXPECT_TRUE(dir.names().empty());
  TokenFileWriter empty(dir / "t.h5", "x", 100, "y");
  EXPECT_TRUE(has(error_of([&] { empty.finish(); }), {dir / "t.h5", "no tokens"}));
  EXPECT_TRUE(dir.names().empty());
  error_of([&] { TokenFileWriter(dir / "no/t.h5", "x", 100, "y"); });
}

TEST_F(DatasetTest, WriterReportsAFullDisk) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  std::optional<TokenFileWriter> writer(std::in_place, dir / "t.h5", "x", 100, "y");
  rlimit limit = before;
  limit.rlim_cur = 1 << 16;
  ::setrlimit(RLIMIT_FSIZE, &limit);
  const std::string small = error_of([&] {  // stays in the buffer until finish
    writer->append(std::vector<uint32_t>(1 << 14, 1));
    writer->append(std::vector<uint32_t>(1, 1));
    writer->finish();
  });
  const std::string large = error_of([&] { writer->append(std::vector<uint32_t>(1 << 20, 1)); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(has(small, {dir / "t.h5", "File too large"}));
  EXPECT_TRUE(has(large, {dir / "t.h5", "File too large"}));
  writer.reset();
  EXPECT_TRUE(dir.names().empty());
}

// --- order

TEST(Permutation, IsABijection) {
  for (int64_t n : {1, 2, 3, 4, 5, 16, 17, 20, 63, 64, 65, 1000, 4097})
    for (uint64_t epoch : {0, 1, 2}) {
      const Permutation permutation(n, 42, epoch);
      std::set<int64_t> seen;
      for (int64_t i = 0; i < n; ++i) seen.insert(permutation(i));
      EXPECT_EQ(static_cast<int64_t>(seen.size()), n);
      EXPECT_EQ(*seen.begin(), 0);
      EXPECT_EQ(*seen.rbegin(), n - 1);
    }
  const Permutation permutation(10, 1, 0);
  error_of([&] { permutation(10); });
  error_of([&] { permutation(-1); });
  error_of([] { Permutation(0, 1, 0); });
}

TEST(Permutation, LargeRanges) {
  const int64_t n = (int64_t{1} << 40) + 12345;
  const Permutation permutation(n, 7, 3);
  std::set<int64_t> seen;
  for (int64_t i = 0; i < 10000; ++i) {
    EXPECT_LT(permutation(n - 1 - i), n);
    seen.insert(permutation(n - 1 - i));
  }
  EXPECT_EQ(seen.size(), 10000u);
}

std::vector<int64_t> order(int64_t n, uint64_t seed, uint64_t epoch) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < n; ++i) all.push_back(Permutation(n, seed, epoch)(i));
  return all;
}

TEST(Permutation, DependsOnSeedAndEpochAlone) {
  EXPECT_EQ(order(100, 1, 0), order(100, 1, 0));
  EXPECT_NE(order(100, 1, 0), order(100, 1, 1));
  EXPECT_NE(order(100, 1, 0), order(100, 2, 0));
  EXPECT_NE(order(100, 1, 0), order(100, 1 + (uint64_t{1} << 32), 0));
  EXPECT_NE(order(100, 1, 0), order(100, 1, uint64_t{1} << 32));
  // Fixed once and for all: a resumed run must meet the order of the run that it continues.
  EXPECT_EQ(order(10, 1234, 5), (std::vector<int64_t>{2, 0, 7, 9, 8, 4, 3, 6, 5, 1}));
}

TEST(Permutation, EveryElementGoesEverywhere) {
  // Where element 0 of 10 lands over 10,000 epochs: 1000 each, standard deviation 30.
  std::vector<int> counts(10);
  for (uint64_t epoch = 0; epoch < 10000; ++epoch) ++counts[Permutation(10, 99, epoch)(0)];
  for (int count : counts) EXPECT_NEAR(count, 1000, 150);
}

TEST_F(DatasetTest, SamplesOfAFile) {
  EXPECT_EQ(Sampler(raw_of_size(65), 8, 4, true, 1).samples(), 8);
  EXPECT_EQ(Sampler(raw_of_size(64), 8, 4, true, 1).samples(), 7);  // one label short
  const Sampler sampler(raw_of_size(8 * 10 + 1), 8, 4, true, 1);
  EXPECT_EQ(sampler.steps_per_epoch(), 2);
  EXPECT_EQ(sampler.dropped_per_epoch(), 2);
}

TEST_F(DatasetTest, TooFewSamplesAreRefusedWithBothNumbers) {
  const TokenFile file = raw_of_size(3 * 8);
  EXPECT_TRUE(has(error_of([&] { Sampler(file, 8, 4, true, 1); }, kExitUsage),
                  {dir / "raw.bin", "24 tokens are 2 samples of 8", "needs 4"}));
  EXPECT_NO_THROW(Sampler(file, 8, 2, true, 1));
  EXPECT_TRUE(has(error_of([&] { Sampler(raw({1}), 8, 1, true, 1); }, kExitUsage), {"0 samples"}));
  error_of([&] { Sampler(file, 0, 2, true, 1); });
}

TEST_F(DatasetTest, AnEpochVisitsEverySampleOnce) {
  const TokenFile file = raw_of_size(64 * 4 + 1);
  for (bool shuffle : {true, false}) {
    const Sampler sampler(file, 4, 8, shuffle, 5);
    std::set<int64_t> seen;
    for (int64_t s = 0; s < sampler.steps_per_epoch(); ++s)
      for (int64_t k = 0; k < 8; ++k) seen.insert(sampler.sample(s, k));
    EXPECT_EQ(seen.size(), 64u);
    EXPECT_EQ(sampler.sample(0, 3) == 3, !shuffle);
  }
}

TEST_F(DatasetTest, EpochsContinueWithTheirOwnPermutation) {
  // 20 samples, global batch 4: step 7 is the third step of epoch 1.
  const Sampler sampler(raw_of_size(20 * 4 + 1), 4, 4, true, 5);
  for (int64_t k = 0; k < 4; ++k) {
    EXPECT_EQ(sampler.sample(7, k), Permutation(20, 5, 1)(8 + k));
    EXPECT_EQ(sampler.sample(4, k), Permutation(20, 5, 0)(16 + k));
  }
  error_of([&] { sampler.sample(0, 4); });
  error_of([&] { sampler.sample(-1, 0); });
}

TEST_F(DatasetTest, RemainderOfAnEpochChanges) {
  const Sampler sampler(raw_of_size(10 * 4 + 1), 4, 4, true, 5);
  std::set<int64_t> left_out;
  for (int64_t epoch = 0; epoch < 20; ++epoch) {
    std::set<int64_t> seen;
    for (int64_t s = 0; s < 2; ++s)
      for (int64_t k = 0; k < 4; ++k) seen.insert(sampler.sample(2 * epoch + s, k));
    EXPECT_EQ(seen.size(), 8u);
    for (int64_t i = 0; i < 10; ++i)
      if (!seen.count(i)) left_out.insert(i);
  }
  EXPECT_GT(left_out.size(), 5u);
}

TEST_F(DatasetTest, SamplesOfAStepDoNotDependOnTheRanks) {
  const Sampler sampler(raw_of_size(64 * 4 + 1), 4, 16, true, 5);
  const auto samples_of = [&](int64_t ranks, int64_t micro_batch) {
    std::vector<int64_t> all;
    for (int64_t a = 0; a < 16 / (ranks * micro_batch); ++a)
      for (int64_t r = 0; r < ranks; ++r)
        for (int64_t b = 0; b < micro_batch; ++b)
          all.push_back(sampler.sample(2, a * ranks * micro_batch + r * micro_batch + b));
    return all;
  };
  EXPECT_EQ(samples_of(1, 16), samples_of(4, 2));
  EXPECT_EQ(samples_of(1, 16), samples_of(2, 8));
  EXPECT_EQ(samples_of(1, 16), samples_of(8, 1));
}

TEST_F(DatasetTest, SamplesCrossDocumentEnds) {
  TokenFileWriter writer(dir / "t.h5", "x", 100, "y");
  writer.add_document(std::vector<uint32_t>{1, 2, 3});
  writer.add_document(std::vector<uint32_t>{4, 5});
  writer.finish();
  std::vector<int32_t> ids(5);
  const TokenFile file(dir / "t.h5");
  EXPECT_EQ(Sampler(file, 4, 1, false, 0).samples(), 1);
  file.read(0, 5, 100, ids.data());
  EXPECT_EQ(ids, (std::vector<int32_t>{1, 2, 3, 4, 5}));
}

}  // namespace
}  // namespace qshard
