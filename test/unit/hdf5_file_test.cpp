#include "io/hdf5_file.h"

#include <sys/file.h>
#include <sys/resource.h>

#include <csignal>

#include "files.h"

namespace qshard {
namespace {

struct Hdf5FileTest : testing::Test {
  void write_good(const std::string& name) {
    Hdf5File file = Hdf5File::create(dir / name);
    file.write_attribute("version", 3);
    file.write_attribute("text", std::string("grüße"));
    file.create_dataset("/group/m", Hdf5Type::f32, {4, 2});
    file.write<float>("/group/m", 0, std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8});
    file.close();
  }
  TempDir dir;
};

TEST_F(Hdf5FileTest, AttributesAndRows) {
  write_good("a.h5");
  const Hdf5File file = Hdf5File::open(dir / "a.h5");
  EXPECT_EQ(file.int_attribute("version"), 3);
  EXPECT_EQ(file.text_attribute("text"), "grüße");
  EXPECT_TRUE(file.has_attribute("text"));
  EXPECT_FALSE(file.has_attribute("other"));
  EXPECT_TRUE(file.contains("/group/m"));
  EXPECT_FALSE(file.contains("/group/n"));
  EXPECT_FALSE(file.contains("/no/m"));
  std::vector<float> rows(4);
  file.read<float>("/group/m", 1, rows);
  EXPECT_EQ(rows, (std::vector<float>{3, 4, 5, 6}));
}

TEST_F(Hdf5FileTest, RowsAreWrittenWhereTheyBelong) {
  {
    Hdf5File file = Hdf5File::create(dir / "a.h5");
    file.create_dataset("/t", Hdf5Type::u64, {5});
    file.write<uint64_t>("/t", 3, std::vector<uint64_t>{4, 5});
    file.write<uint64_t>("/t", 0, std::vector<uint64_t>{1, 2, 3});
    file.close();
    file.close();  // twice is harmless
  }
  std::vector<uint64_t> all(5);
  Hdf5File::open(dir / "a.h5").read<uint64_t>("/t", 0, all);
  EXPECT_EQ(all, (std::vector<uint64_t>{1, 2, 3, 4, 5}));
}

TEST_F(Hdf5FileTest, ContiguousDatasetLiesAtItsOffset) {
  write_good("a.h5");
  const Hdf5Dataset d = Hdf5File::open(dir / "a.h5").dataset("/group/m");
  EXPECT_EQ(d.type, Hdf5Type::f32);
  EXPECT_EQ(d.shape, (std::vector<int64_t>{4, 2}));
  EXPECT_TRUE(d.contiguous);
  EXPECT_EQ(read_text(dir / "a.h5").substr(static_cast<size_t>(d.file_offset), 32),
            bytes_of<float>({1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST_F(Hdf5FileTest, ErrorsNameFileObjectAndReason) {
  write_good("a.h5");
  EXPECT_TRUE(has(error_of([&] { Hdf5File::open(dir / "b.h5"); }),
                  {dir / "b.h5", "No such file or directory"}));
  write_text(dir / "c.h5", "no HDF5 at all");
  EXPECT_TRUE(has(error_of([&] { Hdf5File::open(dir / "c.h5"); }), {dir / "c.h5", "signature"}));
  const std::string good = read_text(dir / "a.h5");
  write_text(dir / "d.h5", good.substr(0, good.size() - 100));
  EXPECT_TRUE(has(error_of([&] { Hdf5File::open(dir / "d.h5"); }), {dir / "d.h5", "truncated"}));

  const Hdf5File file = Hdf5File::open(dir / "a.h5");
  std::vector<float> rows(4);
  std::vector<uint32_t> ids(4);
  EXPECT_TRUE(has(error_of([&] { file.read<float>("/n", 0, rows); }), {dir / "a.h5", "/n"}));
  EXPECT_TRUE(has(error_of([&] { file.read<uint32_t>("/group/m", 0, ids); }),
                  {"/group/m holds f32, expected u32"}));
  EXPECT_TRUE(has(error_of([&] { file.read<float>("/group/m", 3, rows); }), {"4 rows"}));
  EXPECT_TRUE(has(error_of([&] { file.read<float>("/group/m", -1, rows); }), {"4 rows"}));
  EXPECT_TRUE(has(error_of([&] { file.int_attribute("text"); }), {"text", "not one integer"}));
  EXPECT_TRUE(has(error_of([&] { file.text_attribute("version"); }), {"not one text but i64"}));
  EXPECT_TRUE(has(error_of([&] { file.int_attribute("absent"); }), {"read attribute absent"}));
}

TEST_F(Hdf5FileTest, AFullDiskIsAnError) {
  // A limit of the file size fails like a full disk, with EFBIG.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const std::string message = error_of([&] {
    Hdf5File file = Hdf5File::create(dir / "a.h5");
    file.create_dataset("/t", Hdf5Type::u32, {1 << 20});
    rlimit limit = before;
    limit.rlim_cur = 1 << 16;
    ::setrlimit(RLIMIT_FSIZE, &limit);
    file.write<uint32_t>("/t", 0, std::vector<uint32_t>(1 << 20, 1));
    file.close();
  });
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(has(message, {dir / "a.h5", "File too large"}));
}

TEST_F(Hdf5FileTest, ReadingNeedsNoLock) {
  write_good("a.h5");
  std::FILE* other = std::fopen((dir / "a.h5").c_str(), "rb");
  ASSERT_EQ(::flock(::fileno(other), LOCK_EX | LOCK_NB), 0);
  EXPECT_NO_THROW(Hdf5File::open(dir / "a.h5"));
  std::fclose(other);
}

}  // namespace
}  // namespace qshard
