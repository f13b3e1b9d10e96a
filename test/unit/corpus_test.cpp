#include "io/corpus.h"

#include <map>
#include <set>

#include "files.h"
#include "io/token_tools.h"

namespace qshard {
namespace {

namespace fs = std::filesystem;

struct CorpusTest : testing::Test {
  void put(const std::string& name, const std::string& text) {
    const std::string path = dir / ("src/" + name);
    fs::create_directories(fs::path(path).parent_path());
    write_text(path, text);
  }
  CorpusOptions options() {
    CorpusOptions o;
    o.paths = {dir / "src"};
    return o;
  }
  std::vector<std::string> names(const CorpusOptions& o) {
    std::vector<std::string> all;
    skips = {};
    for (const CorpusFile& file : list_corpus(o, skips)) all.push_back(file.name);
    return all;
  }
  std::vector<std::string> documents(const std::string& path) {
    const TokenFile file(path);
    std::vector<int32_t> ids(static_cast<size_t>(file.info().tokens));
    file.read(0, file.info().tokens, kByteVocabSize, ids.data());
    std::vector<std::string> all(1);
    for (int32_t id : ids) {
      if (id == 256) {
        all.emplace_back();
      } else {
        all.back() += static_cast<char>(id);
      }
    }
    EXPECT_EQ(all.back(), "") << "the last document has no end";
    all.pop_back();
    return all;
  }
  TempDir dir;
  CorpusSkips skips;
};

TEST_F(CorpusTest, ListsFilesSortedByName) {
  put("b.h", "1");
  put("a/z.h", "2");
  put("a.c", "3");
  put("notes.txt", "4");
  EXPECT_EQ(names(options()), (std::vector<std::string>{"a.c", "a/z.h", "b.h", "notes.txt"}));
  CorpusOptions some = options();
  some.suffixes = {".h", ".c"};
  EXPECT_EQ(names(some), (std::vector<std::string>{"a.c", "a/z.h", "b.h"}));
  some.paths = {dir / "src/notes.txt", dir / "src/a", dir / "src/a"};  // none twice
  EXPECT_EQ(names(some), (std::vector<std::string>{"notes.txt", "z.h"}));
  some.paths = {dir / "none"};
  EXPECT_TRUE(has(error_of([&] { names(some); }, kExitUsage), {dir / "none", "no such file"}));
}

TEST_F(CorpusTest, LinksInFoldersAreNotFollowed) {
  put("a.h", "1");
  fs::create_symlink("a.h", dir / "src/b.h");
  fs::create_directory_symlink(".", dir / "src/loop");
  EXPECT_EQ(names(options()), std::vector<std::string>{"a.h"});
  EXPECT_EQ(skips.not_regular, 2);
}

TEST_F(CorpusTest, BytesBecomeTokens) {
  put("1.h", std::string("a\xff\n"));
  put("2.h", "bc");
  const TokenizedCorpus done = write_byte_tokens(options(), dir / "t.h5", "");
  EXPECT_EQ(done.train.tokens, 3 + 1 + 2 + 1);
  EXPECT_EQ(done.train.documents, 2);
  EXPECT_EQ(done.train.vocab_size, 257);
  EXPECT_EQ(done.train.tokenizer, "bytes");
  EXPECT_EQ(done.counts.files, 2);
  EXPECT_EQ(done.counts.bytes, 5);
  EXPECT_EQ(documents(dir / "t.h5"), (std::vector<std::string>{"a\xff\n", "bc"}));
  EXPECT_EQ(TokenFile(dir / "t.h5").document_offsets(), (std::vector<int64_t>{0, 4}));
}

TEST_F(CorpusTest, FilesLargerThanOnePiece) {
  std::string text(2'500'000, 'x');
  text[1 << 20] = 'y';
  put("big", text);
  write_byte_tokens(options(), dir / "t.h5", "");
  EXPECT_EQ(documents(dir / "t.h5"), std::vector<std::string>{text});
}

TEST_F(CorpusTest, WhatIsNoTextIsSkippedAndCounted) {
  put("good", "text");
  put("empty", "");
  put("binary", std::string("ab\0cd", 5));
  put("late", std::string(100000, 'x') + '\0');
  const TokenizedCorpus done = write_byte_tokens(options(), dir / "t.h5", "");
  EXPECT_EQ(done.counts.files, 1);
  EXPECT_EQ(done.counts.skips.empty, 1);
  EXPECT_EQ(done.counts.skips.binary, 2);
  EXPECT_EQ(documents(dir / "t.h5"), std::vector<std::string>{"text"});
  EXPECT_TRUE(has(summary(done.counts, 2), {"1 files, 4 bytes in 2.00 s", "1 empty, 2 binary"}));
}

TEST_F(CorpusTest, MaxBytesCutsTheLastFile) {
  put("1", "aaaa");
  put("2", "bbbb");
  put("3", "cc");
  CorpusOptions o = options();
  const std::map<int64_t, std::vector<std::string>> expected = {{0, {"aaaa", "bbbb", "cc"}},
                                                                {3, {"aaa"}},
                                                                {8, {"aaaa", "bbbb"}},
                                                                {9, {"aaaa", "bbbb", "c"}},
                                                                {100, {"aaaa", "bbbb", "cc"}}};
  for (const auto& [limit, texts] : expected) {
    o.max_bytes = limit;
    write_byte_tokens(o, dir / "t.h5", "");
    EXPECT_EQ(documents(dir / "t.h5"), texts) << limit;
  }
}

TEST_F(CorpusTest, ValidationDocumentsAreChosenByName) {
  for (int i = 0; i < 400; ++i) put(fmt::format("{:03}.txt", i), fmt::format("text {}", i));
  CorpusOptions o = options();
  o.val_fraction = 0.25;
  const TokenizedCorpus done = write_byte_tokens(o, dir / "t.h5", dir / "v.h5");
  EXPECT_EQ(done.counts.files + done.counts.val_files, 400);
  EXPECT_NEAR(static_cast<double>(done.counts.val_files), 100, 40);
  EXPECT_EQ(done.val.documents, done.counts.val_files);
  std::vector<std::string> all = documents(dir / "t.h5");
  const std::vector<std::string> val = documents(dir / "v.h5");
  for (const std::string& text : val)
    EXPECT_TRUE(is_validation(fmt::format("{:03}.txt", std::stoi(text.substr(5))), 0.25)) << text;
  all.insert(all.end(), val.begin(), val.end());
  EXPECT_EQ((std::set<std::string>(all.begin(), all.end()).size()), 400u);

  // The same documents from another folder, whatever its path is.
  fs::rename(dir / "src", dir / "moved");
  o.paths = {dir / "moved"};
  write_byte_tokens(o, dir / "t2.h5", dir / "v2.h5");
  EXPECT_EQ(documents(dir / "v2.h5"), val);
}

TEST_F(CorpusTest, EmptyPartsAreRefused) {
  put("a", "text");
  CorpusOptions o = options();
  o.val_fraction = 0;
  EXPECT_TRUE(has(error_of([&] { write_byte_tokens(o, dir / "t.h5", dir / "v.h5"); }),
                  {"none of 1 documents", dir / "v.h5"}));
  o.val_fraction = 1;
  EXPECT_TRUE(has(error_of([&] { write_byte_tokens(o, dir / "t.h5", dir / "v.h5"); }),
                  {"none of 1 documents", dir / "t.h5"}));
  o.suffixes = {".none"};
  EXPECT_TRUE(has(error_of([&] { write_byte_tokens(o, dir / "t.h5", ""); }), {"no text files"}));
  EXPECT_EQ(dir.names(), std::vector<std::string>{"src"});
}

// --- info and import

struct ImportTest : CorpusTest {
  void write_llmc(const std::vector<uint16_t>& ids) {
    std::vector<int32_t> header(256, 0);
    header[0] = 20240520;
    header[1] = 1;
    header[2] = static_cast<int32_t>(ids.size());
    write_text(dir / "a.bin", bytes_of(header) + bytes_of(ids));
  }
};

TEST_F(ImportTest, LlmcWithItsDocuments) {
  write_llmc({50256, 1, 2, 50256, 50256, 3});
  const TokenFileInfo info = import_tokens(dir / "a.bin", "llmc", {}, dir / "t.h5");
  EXPECT_EQ(info.vocab_size, 50257);
  EXPECT_EQ(info.tokens, 6);
  const TokenFile file(dir / "t.h5");
  EXPECT_EQ(file.document_offsets(), (std::vector<int64_t>{0, 3, 4}));
  EXPECT_EQ(first_tokens(file, 4), "50256 1 2 50256");
  EXPECT_EQ(largest_id(file), 50256);
  const DocumentLengths lengths = document_lengths(file);
  EXPECT_EQ(lengths.shortest, 1);
  EXPECT_EQ(lengths.longest, 3);
  EXPECT_EQ(lengths.mean, 2.0);
}

TEST_F(ImportTest, RawNeedsAVocabulary) {
  write_text(dir / "r", bytes_of<uint32_t>({5, 151643, 9, 5, 6}));
  EXPECT_TRUE(
      has(error_of([&] { import_tokens(dir / "r", "raw-u32", {}, dir / "t.h5"); }, kExitUsage),
          {"--vocab-size"}));
  EXPECT_TRUE(has(error_of([&] {
                    import_tokens(dir / "r", "raw-u32", {151643, {}}, dir / "t.h5");
                  }),
                  {"token 1 (byte 4", "151643"}));
  EXPECT_EQ(import_tokens(dir / "r", "raw-u32", {151936, {}}, dir / "t.h5").documents, 1);
  EXPECT_EQ(import_tokens(dir / "r", "raw-u32", {151936, 5}, dir / "t.h5").documents, 2);
  EXPECT_EQ(TokenFile(dir / "t.h5").document_offsets(), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(largest_id(TokenFile(dir / "t.h5")), 151643);
}

TEST_F(ImportTest, DocumentsAcrossPieces) {
  std::vector<uint32_t> ids((1 << 20) + 100, 1);
  ids[1 << 20] = 7;  // the first token of the second piece
  ids[(1 << 20) + 50] = 7;
  write_text(dir / "r", bytes_of(ids));
  import_tokens(dir / "r", "raw-u32", {100, 7}, dir / "t.h5");
  EXPECT_EQ(TokenFile(dir / "t.h5").document_offsets(),
            (std::vector<int64_t>{0, 1 << 20, (1 << 20) + 50}));
}

TEST_F(ImportTest, AnHdf5FileNeedsNoImport) {
  put("a", "text");
  write_byte_tokens(options(), dir / "t.h5", "");
  EXPECT_TRUE(
      has(error_of([&] { import_tokens(dir / "t.h5", "llmc", {}, dir / "u.h5"); }, kExitUsage),
          {"already"}));
}

TEST_F(ImportTest, Description) {
  put("a", "line 1\nline \"2\"\xff");
  write_byte_tokens(options(), dir / "t.h5", "");
  const nlohmann::ordered_json d = describe_tokens(TokenFile(dir / "t.h5"), 4, true);
  EXPECT_EQ(d["tokens"], 17);
  EXPECT_EQ(d["samples"], 4);
  EXPECT_EQ(d["documents"], 1);
  EXPECT_EQ(d["document_tokens_max"], 17);
  EXPECT_EQ(d["largest_id"], 256);
  EXPECT_EQ(d["vocab_size"], 257);
  EXPECT_EQ(d["first_tokens"], "\"line 1\\nline \\\"2\\\"\xef\xbf\xbd\"");
}

}  // namespace
}  // namespace qshard
