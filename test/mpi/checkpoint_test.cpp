#include "io/checkpoint.h"

#include <hdf5.h>
#include <sys/resource.h>
#include <xxhash.h>

#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>

#include "../test_main.h"
#include "../unit/files.h"
#include "io/hdf5_file.h"
#include "tiny_model.h"
#include "train/checkpointer.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

namespace qshard {
namespace {

namespace fs = std::filesystem;

const World& world() { return test_world(); }

// A folder that all ranks see, made and removed by rank 0.
class SharedFolder {
 public:
  SharedFolder() {
    if (world().rank() == 0) own_ = std::make_unique<TempDir>();
    path_ = world().broadcast(own_ ? *own_ / "" : "", 0);
  }
  ~SharedFolder() { world().barrier(); }
  SharedFolder(const SharedFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + name; }
  std::string checkpoint(int64_t step) const { return path_ + fmt::format("step-{:08}.h5", step); }
  const std::string& path() const { return path_; }

  std::vector<std::string> names() const {
    world().barrier();
    std::vector<std::string> all;
    for (const auto& item : fs::directory_iterator(path_))
      all.push_back(item.path().filename().string());
    std::sort(all.begin(), all.end());
    world().barrier();
    return all;
  }

 private:
  std::unique_ptr<TempDir> own_;
  std::string path_;
};

// Rank 0 does it, then all go on.
void on_rank0(const std::function<void()>& fn) {
  collectively(world(), [&] {
    if (world().rank() == 0) fn();
  });
}

// The message of the AgreedError that all ranks throw; fails when they do not, or differ.
std::string agreed_error(const std::function<void()>& fn) {
  std::string text;
  try {
    fn();
  } catch (const AgreedError& error) {
    text = error.what();
  }
  EXPECT_NE(text, "");
  EXPECT_EQ(world().broadcast(text, 0), text);
  return text;
}

// The value of an element of a tensor at a step, whatever rank holds it.
float value_of(size_t tensor, int64_t index, int64_t step) {
  return std::sin(static_cast<float>(tensor * 1000003 + index * 7 + step));
}

// Rows [begin, end) of a dimension on a rank.
using RowDeal = std::function<std::pair<int64_t, int64_t>(int64_t rows, int rank)>;

std::pair<int64_t, int64_t> padded(int64_t rows, int rank) {  // as FSDP deals them, some to nobody
  const int64_t chunk = (rows + world().size() - 1) / world().size();
  const int64_t begin = std::min(rank * chunk, rows);
  return {begin, std::min(begin + chunk, rows)};
}
std::pair<int64_t, int64_t> all_to_last(int64_t rows, int rank) {
  return {rank == world().size() - 1 ? 0 : rows, rows};
}

struct Tensors {
  std::vector<std::string> names = {
      "/model/a.weight",    "/optim/exp_avg/a.weight",    "/optim/exp_avg_sq/a.weight",
      "/model/norm.weight", "/optim/exp_avg/norm.weight", "/optim/exp_avg_sq/norm.weight"};
  std::vector<Shape> shapes = {{53, 12}, {53, 12}, {53, 12}, {9}, {9}, {9}};
  std::vector<std::vector<float>> memory;
  std::vector<CheckpointTensor> own;

  explicit Tensors(const RowDeal& deal = padded) {
    for (size_t i = 0; i < names.size(); ++i) {
      const auto [begin, end] = deal(shapes[i][0], world().rank());
      memory.emplace_back((end - begin) * shapes[i].row_numel(), -1.0f);
      own.push_back({names[i], shapes[i], begin,
                     Tensor::of(memory[i].data(), {static_cast<int64_t>(memory[i].size())})});
    }
  }
  void fill(int64_t step) {
    for_each([&](float& v, size_t i, int64_t index) { v = value_of(i, index, step); });
  }
  void expect(int64_t step) {
    int64_t wrong = 0;
    for_each([&](float& v, size_t i, int64_t index) { wrong += v != value_of(i, index, step); });
    EXPECT_EQ(wrong, 0);
  }

 private:
  template <typename F>
  void for_each(F fn) {
    for (size_t i = 0; i < memory.size(); ++i)
      for (size_t e = 0; e < memory[i].size(); ++e)
        fn(memory[i][e], i, own[i].first_row * shapes[i].row_numel() + static_cast<int64_t>(e));
  }
};

CheckpointState state_of(int64_t step) {
  CheckpointState s;
  s.step = step, s.updates = step - 1, s.samples = step * 12, s.epoch = 3;
  s.seed = 0xfedcba9876543210u;
  s.model = {{"vocab_size", 53}}, s.run = {{"train", {{"steps", 99}}}};
  return s;
}

SaveReport save(const SharedFolder& folder, int64_t step, const SaveOptions& options = {}) {
  Tensors tensors;
  tensors.fill(step);
  return save_checkpoint(world(), folder.path(), state_of(step), tensors.own, options);
}

void expect_loads(const std::string& path, int64_t step, const RowDeal& deal = padded) {
  Tensors tensors(deal);
  load_checkpoint(world(), path, tensors.own, false);
  tensors.expect(step);
}

std::string load_error(const std::string& path) {
  Tensors tensors;
  return agreed_error([&] { load_checkpoint(world(), path, tensors.own, false); });
}

struct Found {
  std::string path, warnings;
};
Found find(const SharedFolder& folder) {
  Found found;
  found.path = find_checkpoint(world(), folder.path(),
                               [&](const std::string& text) { found.warnings += text + "\n"; });
  EXPECT_EQ(world().broadcast(found.path, 0), found.path);
  found.warnings = world().broadcast(found.warnings, 0);
  return found;
}

void flip_byte(const std::string& path, int64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(offset);
  const char byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(offset);
  file.put(byte);
}

// Edits a file through HDF5 itself.
void edit(const std::string& path, const std::function<void(hid_t)>& fn) {
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
  ASSERT_GE(file, 0);
  fn(file);
  ASSERT_GE(H5Fclose(file), 0);
}

void remove_dataset(hid_t file, const char* name) {
  ASSERT_GE(H5Ldelete(file, name, H5P_DEFAULT), 0);
}

void add_dataset(hid_t file, const char* name, std::vector<hsize_t> shape, hid_t type) {
  const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
  const hid_t create = H5Pcreate(H5P_DATASET_CREATE);
  H5Pset_alloc_time(create, H5D_ALLOC_TIME_EARLY);
  const hid_t set = H5Dcreate2(file, name, type, space, H5P_DEFAULT, create, H5P_DEFAULT);
  ASSERT_GE(set, 0);
  H5Pclose(create);
  H5Dclose(set);
  H5Sclose(space);
}

void set_attribute(hid_t file, const char* object, const char* name, int64_t value) {
  ASSERT_GE(H5Adelete_by_name(file, object, name, H5P_DEFAULT), 0);
  const hid_t space = H5Screate(H5S_SCALAR);
  const hid_t a = H5Acreate_by_name(file, object, name, H5T_STD_I64LE, space, H5P_DEFAULT,
                                    H5P_DEFAULT, H5P_DEFAULT);
  ASSERT_GE(H5Awrite(a, H5T_NATIVE_INT64, &value), 0);
  H5Aclose(a);
  H5Sclose(space);
}

int64_t offset_of(const std::string& path, const std::string& dataset) {
  return Hdf5File::open(path).dataset(dataset).file_offset;
}

// A limit of this process while the object lives.
class Limit {
 public:
  Limit(decltype(RLIMIT_FSIZE) what, rlim_t value, bool here) : what_(what) {
    getrlimit(what_, &old_);
    rlimit lower = old_;
    if (here) lower.rlim_cur = value;
    setrlimit(what_, &lower);
    std::signal(SIGXFSZ, SIG_IGN);
  }
  ~Limit() { setrlimit(what_, &old_); }
  Limit(const Limit&) = delete;

 private:
  decltype(RLIMIT_FSIZE) what_;
  rlimit old_{};
};

// HDF5 1.10 frees nothing of a file whose closing has failed. Leaks are not looked for while the
// object lives, in which HDF5 takes no memory that it has kept from before.
class LibraryMayLeak {
 public:
  LibraryMayLeak() { H5garbage_collect(); }

#if defined(__SANITIZE_ADDRESS__)
 private:
  __lsan::ScopedDisabler disabler_;
#endif
};

TEST(Checkpoint, ComesBackOnAnyLayout) {
  const SharedFolder folder;
  const SaveReport report = save(folder, 7);
  EXPECT_EQ(report.path, folder.checkpoint(7));
  EXPECT_EQ(report.bytes, 4 * 3 * (53 * 12 + 9));
  EXPECT_EQ(report.warning, "");
  expect_loads(report.path, 7);
  expect_loads(report.path, 7, all_to_last);

  const CheckpointState s = read_checkpoint_state(report.path);
  EXPECT_EQ(s.step, 7);
  EXPECT_EQ(s.updates, 6);
  EXPECT_EQ(s.samples, 84);
  EXPECT_EQ(s.epoch, 3);
  EXPECT_EQ(s.seed, 0xfedcba9876543210u);
  EXPECT_EQ(s.world_size, world().size());
  EXPECT_EQ(s.model["vocab_size"], 53);
  EXPECT_EQ(s.run["train"]["steps"], 99);
  EXPECT_EQ(folder.names(), std::vector<std::string>{"step-00000007.h5"});
}

// With a scale of the loss, exactly, or without.
TEST(Checkpoint, HoldsTheLossScale) {
  const SharedFolder folder;
  Tensors tensors;
  tensors.fill(1);
  for (double scale : {0.0, 1.0, 65536.0, 0x1p100, 1000.0 / 3}) {
    CheckpointState state = state_of(1);
    state.loss_scale = scale;
    state.growth_tracker = scale > 0 ? 1999 : 0;
    const std::string path = save_checkpoint(world(), folder.path(), state, tensors.own, {}).path;
    const CheckpointState found = read_checkpoint_state(path);
    EXPECT_EQ(found.loss_scale, scale);
    EXPECT_EQ(found.growth_tracker, state.growth_tracker);
  }
}

TEST(Checkpoint, WhatIsInTheFileDoesNotDependOnRanks) {
  const SharedFolder folder;
  save(folder, 4);
  const Hdf5File file = Hdf5File::open(folder.checkpoint(4));
  const Tensors tensors;
  std::vector<std::string> sorted = tensors.names;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(file.datasets(), sorted);
  for (size_t i = 0; i < sorted.size(); ++i) {
    const Shape& shape = tensors.shapes[i];
    const int64_t row = shape.row_numel();
    std::vector<float> all(shape.numel());
    for (int64_t e = 0; e < shape.numel(); ++e) all[e] = value_of(i, e, 4);
    uint64_t sum = 0;
    for (int64_t r = 0; r < shape[0]; ++r) sum += XXH3_64bits_withSeed(&all[r * row], row * 4, r);
    EXPECT_EQ(file.int_attribute("xxh3_rows", tensors.names[i]), static_cast<int64_t>(sum));
    std::vector<float> stored(shape.numel());
    file.read(tensors.names[i], 0, std::span<float>(stored));
    EXPECT_EQ(std::memcmp(stored.data(), all.data(), all.size() * 4), 0);
    EXPECT_EQ(file.dataset(tensors.names[i]).layout, "contiguous");
  }
}

// Memory in which the host reads wrong values, as it would on a GPU: all bits are turned over.
class FarDevice : public Device {
 public:
  std::string name() const override { return "far"; }
  void* allocate(size_t bytes) override { return test_backend().device->allocate(bytes); }
  void release(void* data, size_t bytes) noexcept override {
    test_backend().device->release(data, bytes);
  }
  void copy(void* to, const void* from, size_t bytes) override {
    if (copies++ == last_copy) fail("the device is lost");
    for (size_t i = 0; i < bytes; ++i)
      static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(~static_cast<const uint8_t*>(from)[i]);
    largest = std::max(largest, bytes);
  }
  void zero(void* data, size_t bytes) override { std::memset(data, 0xff, bytes); }
  Device& host() override { return *test_backend().device; }
  int64_t copies = 0, last_copy = -1;
  size_t largest = 0;
};

// Tensors that lie there.
struct FarTensors : Tensors {
  FarDevice device;
  void turn_over() {
    for (std::vector<float>& values : memory)
      device.copy(values.data(), values.data(), values.size() * sizeof(float));
    device.copies = 0, device.largest = 0;
  }
};

TEST(Checkpoint, RowsOfADeviceGoThroughTheHostInPieces) {
  for (const int64_t piece : {int64_t{1}, int64_t{100}, int64_t{1} << 20}) {
    const SharedFolder here, there;
    save(here, 1);
    FarTensors far;
    far.fill(1);
    far.turn_over();
    SaveOptions options;
    options.piece_bytes = piece;
    save_checkpoint(world(), there.path(), state_of(1), far.own, options, Staging(far.device));
    EXPECT_LE(far.device.largest, static_cast<size_t>(std::max<int64_t>(piece, 48)));  // a row
    const Hdf5File a = Hdf5File::open(here.checkpoint(1)), b = Hdf5File::open(there.checkpoint(1));
    for (const std::string& name : a.datasets())
      EXPECT_EQ(a.int_attribute("xxh3_rows", name), b.int_attribute("xxh3_rows", name)) << name;
    expect_loads(there.checkpoint(1), 1);
    FarTensors back;
    load_checkpoint(world(), here.checkpoint(1), back.own, false, Staging(back.device));
    back.turn_over();
    back.expect(1);
  }
}

TEST(Checkpoint, OneRankThatLosesItsDeviceIsNamed) {
  const SharedFolder folder;
  FarTensors far;
  const auto save_step = [&](int64_t step) {
    far.device.copies = 0;
    save_checkpoint(world(), folder.path(), state_of(step), far.own, {}, Staging(far.device));
  };
  far.fill(1);
  far.turn_over();
  save_step(1);
  const int64_t reads = far.device.copies / 2;  // of one of two passes: to check, to write
  const int bad = world().size() - 1;
  for (const int64_t last : {int64_t{0}, reads}) {
    if (world().rank() == bad) far.device.last_copy = last;
    const std::string error = agreed_error([&] { save_step(2); });
    EXPECT_TRUE(has(error, {"step 2", "older ones are intact", "the device is lost"}));
    EXPECT_EQ(folder.names(), std::vector<std::string>{"step-00000001.h5"});
  }
}

TEST(Checkpoint, PiecesAndTransfersGiveTheSameBytes) {
  const SharedFolder folder;
  for (const bool collective : {false, true})
    for (const int64_t piece : {1, 100, 1000, 512 << 20}) {
      SaveOptions options;
      options.collective = collective;
      options.piece_bytes = piece;  // 1: a row at a time, ranks without rows still take part
      save(folder, 2, options);
      expect_loads(folder.checkpoint(2), 2);
      EXPECT_TRUE(verify_checkpoint(world(), folder.checkpoint(2)).empty());
    }
}

// Above the 2 GiB at which MPI-IO's counts end; takes 2.5 GB of memory and of disk.
TEST(Checkpoint, RowsOfMoreThan2GiBOnOneRank) {
  if (!std::getenv("QSHARD_SLOW_TESTS")) GTEST_SKIP() << "QSHARD_SLOW_TESTS is not set";
  const SharedFolder folder;
  const Shape shape = {151936, 4096};
  const auto [first, end] = all_to_last(shape[0], world().rank());
  const int64_t row = shape.row_numel(), numel = (end - first) * row;
  const auto value = [](int64_t i) {
    return static_cast<float>((i * 2654435761u) >> 8 & 0xffffff);
  };
  std::vector<float> values(numel);
  for (int64_t i = 0; i < numel; ++i) values[i] = value(i);
  const std::vector<CheckpointTensor> tensors = {
      {"/model/a.weight", shape, first, Tensor::of(values.data(), {numel})}};
  save_checkpoint(world(), folder.path(), state_of(1), tensors, {});
  std::fill(values.begin(), values.end(), -1.0f);
  load_checkpoint(world(), folder.checkpoint(1), tensors, false);
  int64_t wrong = 0;
  for (int64_t i = 0; i < numel; ++i) wrong += values[i] != value(i);
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(verify_checkpoint(world(), folder.checkpoint(1)).empty());
}

TEST(Checkpoint, LargeDatasetsAreAligned) {
  const SharedFolder folder;
  SaveOptions options;
  for (const int64_t alignment : {512, 2048}) {
    options.alignment = alignment;  // of the matrix of 2544 bytes, not of the norm of 36
    save(folder, 1, options);
    EXPECT_EQ(offset_of(folder.checkpoint(1), "/model/a.weight") % alignment, 0);
  }
}

TEST(Checkpoint, HintsAreCheckedBeforeAnythingIsWritten) {
  const SharedFolder folder;
  SaveOptions options;
  options.hints = "striping_factor=2,striping_unit=65536";
  save(folder, 1, options);
  expect_loads(folder.checkpoint(1), 1);
  for (const char* wrong : {"striping", "=4", "a=1,,b=2"})
    EXPECT_TRUE(has(error_of([&] { parse_hints(wrong); }, kExitUsage), {"key=value"})) << wrong;
  EXPECT_EQ(parse_hints("a=1,b=x=y").at(1).second, "x=y");
}

TEST(Checkpoint, OtherTensorsThanTheModelsAreNamed) {
  const SharedFolder folder;
  struct Case {
    std::function<void(hid_t)> change;
    std::vector<std::string> said;
  };
  const char* moment = "/optim/exp_avg_sq/norm.weight";
  const Case cases[] = {
      {[&](hid_t f) { remove_dataset(f, moment); }, {moment, "missing"}},
      {[&](hid_t f) { H5Lmove(f, moment, f, "/optim/exp_avg_sq/n", H5P_DEFAULT, H5P_DEFAULT); },
       {moment, "missing"}},
      {[&](hid_t f) {
         add_dataset(f, "/model/more", {2, 2}, H5T_NATIVE_FLOAT);
       },
       {"/model/more", "does not belong"}},
      {[&](hid_t f) {
         remove_dataset(f, moment);
         add_dataset(f, moment, {3, 3}, H5T_NATIVE_FLOAT);
       },
       {moment, "[9]", "[3, 3]"}},
      {[&](hid_t f) {
         remove_dataset(f, moment);
         add_dataset(f, moment, {9}, H5T_NATIVE_DOUBLE);
       },
       {moment, "f32", "f64"}},
      {[&](hid_t f) {
         remove_dataset(f, moment);
         add_dataset(f, moment, {9}, H5T_NATIVE_FLOAT);
       },
       {moment, "no checksum"}},
  };
  for (const Case& c : cases) {
    save(folder, 3);
    on_rank0([&] { edit(folder.checkpoint(3), c.change); });
    EXPECT_TRUE(has(load_error(folder.checkpoint(3)), c.said));
  }
}

TEST(Checkpoint, WeightsAloneIgnoreTheMoments) {
  const SharedFolder folder;
  save(folder, 3);
  on_rank0([&] {
    edit(folder.checkpoint(3), [](hid_t f) { remove_dataset(f, "/optim/exp_avg/a.weight"); });
  });
  Tensors tensors;
  std::vector<CheckpointTensor> weights = {tensors.own[0], tensors.own[3]};
  load_checkpoint(world(), folder.checkpoint(3), weights, true);
  for (const size_t i : {0, 3})
    for (const float v : tensors.memory[i]) EXPECT_NE(v, -1.0f);
  for (const float v : tensors.memory[1]) EXPECT_EQ(v, -1.0f);
}

TEST(Checkpoint, DamagedOnesAreNamedAndSkipped) {
  struct Case {
    const char* what;
    std::function<void(const std::string&)> damage;
    std::string said;
  };
  const Case cases[] = {
      {"truncated", [](const auto& p) { fs::resize_file(p, fs::file_size(p) - 100); }, "trunc"},
      {"empty", [](const auto& p) { fs::resize_file(p, 0); }, "cannot open"},
      {"no HDF5", [](const auto& p) { write_text(p, "not a checkpoint"); }, "cannot open"},
      {"first byte", [](const auto& p) { flip_byte(p, 0); }, "cannot open"},
      {"a weight", [](const auto& p) { flip_byte(p, offset_of(p, "/model/a.weight") + 1000); },
       "checksum of /model/a.weight"},
      {"the last moment",
       [](const auto& p) {
         const std::string name = "/optim/exp_avg_sq/norm.weight";
         flip_byte(p, offset_of(p, name) + 35);
       },
       "checksum of /optim/exp_avg_sq/norm.weight"},
      {"a checksum",
       [](const auto& p) {
         edit(p, [](hid_t f) { set_attribute(f, "/model/norm.weight", "xxh3_rows", 5); });
       },
       "checksum of /model/norm.weight"},
      {"the step",
       [](const auto& p) { edit(p, [](hid_t f) { set_attribute(f, "/", "step", 9); }); },
       "header is damaged"},
      {"a missing moment",
       [](const auto& p) {
         edit(p, [](hid_t f) { remove_dataset(f, "/optim/exp_avg/a.weight"); });
       },
       "missing: /optim/exp_avg/a.weight"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    const SharedFolder folder;
    save(folder, 1);
    save(folder, 2);
    on_rank0([&] { c.damage(folder.checkpoint(2)); });
    const Found found = find(folder);
    EXPECT_EQ(found.path, folder.checkpoint(1));
    EXPECT_TRUE(has(found.warnings, {"skipped", folder.checkpoint(2), c.said}));
    on_rank0([&] { c.damage(folder.checkpoint(1)); });
    EXPECT_TRUE(has(agreed_error([&] { find(folder); }), {"none of them usable", "2 checkpoint"}));
  }
}

TEST(Checkpoint, ADamagedOneIsNotLoaded) {
  const SharedFolder folder;
  save(folder, 1);
  on_rank0([&] {
    flip_byte(folder.checkpoint(1), offset_of(folder.checkpoint(1), "/optim/exp_avg/a.weight"));
  });
  EXPECT_EQ(verify_checkpoint(world(), folder.checkpoint(1)),
            std::vector<std::string>{"/optim/exp_avg/a.weight"});
  EXPECT_TRUE(has(load_error(folder.checkpoint(1)), {"/optim/exp_avg/a.weight", "damaged"}));
}

TEST(Checkpoint, TheNewestIsTheOneWithTheHighestStepInside) {
  const SharedFolder folder;
  SaveOptions options;
  options.keep_last = 0;
  for (const int64_t step : {9, 10, 11}) save(folder, step, options);
  on_rank0([&] {
    fs::rename(folder.checkpoint(9), folder / "step-9.h5");
    fs::rename(folder.checkpoint(10), folder / "step-best.h5");
    fs::rename(folder.checkpoint(11), folder / "a.h5");
    fs::create_directory(folder / "step-99999999.h5");
    write_text(folder / "step-00000050.h5.tmp", "half");
  });
  const Found found = find(folder);
  EXPECT_EQ(found.path, folder / "a.h5");
  EXPECT_TRUE(has(found.warnings, {"step-00000050.h5.tmp", "unfinished"}));
}

TEST(Checkpoint, NothingToFindIsNoError) {
  const SharedFolder folder;
  EXPECT_EQ(find(folder).path, "");
  on_rank0([&] { write_text(folder / "step-00000003.h5.tmp", "half"); });
  EXPECT_EQ(find(folder).path, "");
  EXPECT_TRUE(list_checkpoints(folder / "missing").empty());
}

TEST(Checkpoint, OldOnesAreDeletedAndNothingElse) {
  const SharedFolder folder;
  on_rank0([&] {
    write_text(folder / "notes.txt", "keep");
    write_text(folder / "step-99999.tmp", "not ours");
    write_text(folder / "step-00000001.h5.tmp", "from a killed save");
    write_text(folder / "broken.h5", "no checkpoint");
    fs::create_directory(folder / "step-50");
  });
  SaveOptions options;
  options.keep_last = 2;
  options.keep_every = 3;
  for (int64_t step = 1; step <= 7; ++step) save(folder, step, options);
  EXPECT_EQ(folder.names(),
            (std::vector<std::string>{"broken.h5", "notes.txt", "step-00000003.h5",
                                      "step-00000005.h5", "step-00000006.h5", "step-00000007.h5",
                                      "step-50", "step-99999.tmp"}));
}

// After going back to an earlier step the abandoned ones are newer.
TEST(Checkpoint, TheOneJustSavedIsNeverDeleted) {
  const SharedFolder folder;
  SaveOptions options;
  options.keep_last = 1;
  save(folder, 20, options);
  save(folder, 10, options);
  EXPECT_EQ(folder.names(), std::vector<std::string>{"step-00000010.h5"});
}

TEST(Checkpoint, FolderThatCannotBeMade) {
  const SharedFolder folder;
  on_rank0([&] { write_text(folder / "file", ""); });
  Tensors tensors;
  const std::string error = agreed_error(
      [&] { save_checkpoint(world(), folder / "file/checkpoints", state_of(1), tensors.own, {}); });
  EXPECT_TRUE(has(error, {"step 1", folder / "file", "Not a directory"}));
}

// A full disk, on one rank or on the one that reserves the space.
TEST(Checkpoint, OneRankThatCannotWriteIsNamed) {
  for (const int victim : {0, world().size() - 1}) {
    SCOPED_TRACE(fmt::format("rank {}", victim));
    const SharedFolder folder;
    save(folder, 1);
    std::string error;
    {
      const LibraryMayLeak library_may_leak;
      const Limit limit(RLIMIT_FSIZE, 4096, world().rank() == victim);
      error = agreed_error([&] { save(folder, 2); });
    }
    EXPECT_TRUE(has(error, {"step 2", "older ones are intact", "File too large"}));
    if (world().size() > 1) {
      EXPECT_TRUE(has(error, {fmt::format("rank {} on", victim)}));
    }
    EXPECT_EQ(folder.names(), std::vector<std::string>{"step-00000001.h5"});
    EXPECT_TRUE(verify_checkpoint(world(), folder.checkpoint(1)).empty());
    save(folder, 2);
    expect_loads(folder.checkpoint(2), 2);
  }
}

TEST(Checkpoint, OneRankThatCannotOpenIsNamed) {
  const SharedFolder folder;
  save(folder, 1);
  const int victim = world().size() - 1;
  std::string saving, loading;
  {
    const Limit limit(RLIMIT_NOFILE, 3, world().rank() == victim);
    saving = agreed_error([&] { save(folder, 2); });
    loading = load_error(folder.checkpoint(1));
  }
  EXPECT_TRUE(has(saving, {"Too many open files", "step-00000002.h5"}));
  EXPECT_TRUE(has(loading, {"Too many open files", "step-00000001.h5"}));
  if (world().size() > 1) {
    EXPECT_TRUE(has(saving + loading, {fmt::format("rank {} on", victim)}));
  }
  EXPECT_EQ(folder.names(), std::vector<std::string>{"step-00000001.h5"});
  expect_loads(folder.checkpoint(1), 1);
}

TEST(Checkpoint, AFileThatOneRankDoesNotSeeStopsAll) {
  const SharedFolder folder;
  save(folder, 1);
  const std::string path =
      world().rank() == world().size() - 1 ? folder / "none.h5" : folder.checkpoint(1);
  Tensors tensors;
  const std::string error =
      agreed_error([&] { load_checkpoint(world(), path, tensors.own, false); });
  EXPECT_TRUE(has(error, {"none.h5", "No such file"}));
}

// Training with checkpoints.

struct TrainedModel {
  TinyRun tiny;
  int64_t rows = 2 * world().size() * 2;  // two micro-batches a rank
  std::unique_ptr<Engine> engine = tiny.engine();

  std::vector<double> steps(int64_t first, int64_t last) {
    std::vector<double> seen;
    for (int64_t s = first; s <= last; ++s) {
      const GlobalBatch batch(s, rows, tiny.T, tiny.config.vocab_size);
      const StepResult r = engine->step(deal(batch, tiny.B, Deal::split), tiny.lr);
      seen.insert(seen.end(), {r.loss, r.grad_norm, r.loss_scale});
    }
    return seen;
  }
  Checkpointer checkpointer(const SharedFolder& folder, bool async) {
    CheckpointOptions options;
    options.async = async;
    return Checkpointer(options, folder.path(), engine->mesh(), test_backend(), engine->model());
  }
  CheckpointState state(int64_t step) const {
    CheckpointState s = state_of(step);
    s.updates = engine->updates();
    if (engine->scaler()) {
      s.loss_scale = engine->scaler()->scale();
      s.growth_tracker = engine->scaler()->growth_tracker();
    }
    return s;
  }
  // Grows after every second good step.
  void scale_quickly() {
    GradScalerOptions quick;
    quick.growth_interval = 2;
    if (engine->scaler()) engine->scaler().emplace(quick);
  }
  void restore(const std::string& path) {
    load_checkpoint(world(), path, checkpoint_tensors(engine->model(), false), false);
    for (int u = 0; u < engine->model().num_units(); ++u) {
      engine->model().unit(u).cast_to_compute();
      engine->model().unit(u).publish();
    }
    const CheckpointState s = read_checkpoint_state(path);
    engine->restore(s.step, s.updates);
    if (engine->scaler()) engine->scaler()->restore(s.loss_scale, s.growth_tracker);
  }
};

TEST(Resume, IsBitwiseTheUninterruptedRun) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::fp16})
    for (const char* transport : {"shm", "mpi"})
      for (const bool async : {false, true}) {
        SCOPED_TRACE(fmt::format("{} {} async {}", dtype_name(dtype), transport, async));
        const SharedFolder folder;
        TinyRun tiny;
        tiny.fsdp.param_dtype = dtype;
        tiny.transport = transport;
        TrainedModel straight{tiny};
        straight.scale_quickly();
        straight.steps(1, 3);
        if (dtype == DType::fp16) {  // amid an interval
          EXPECT_EQ(straight.engine->scaler()->growth_tracker(), 1);
        }
        Checkpointer checkpointer = straight.checkpointer(folder, async);
        checkpointer.save(straight.state(3));
        const std::vector<double> expected = straight.steps(4, 6);  // under an async save
        checkpointer.finish();
        EXPECT_EQ(checkpointer.last_step(), 3);

        tiny.seed = 99;  // other initial weights: all have to come from the file
        TrainedModel resumed{tiny};
        resumed.scale_quickly();
        resumed.restore(folder.checkpoint(3));
        EXPECT_EQ(resumed.steps(4, 6), expected);
        EXPECT_EQ(weights_of(*resumed.engine), weights_of(*straight.engine));
        EXPECT_EQ(resumed.state(6).loss_scale, straight.state(6).loss_scale);
        EXPECT_EQ(resumed.state(6).growth_tracker, straight.state(6).growth_tracker);
      }
}

TEST(Resume, HoldsMomentsAndPaddingStaysOut) {
  const SharedFolder folder;
  TrainedModel run;
  run.steps(1, 2);
  Checkpointer checkpointer = run.checkpointer(folder, false);
  checkpointer.save(run.state(2));
  const Hdf5File file = Hdf5File::open(folder.checkpoint(2));
  double sums[2] = {0, 0};
  for (const CheckpointTensor& t : checkpoint_tensors(run.engine->model(), false)) {
    if (!t.dataset.starts_with("/optim/exp_avg_sq/")) continue;
    for (int64_t i = 0; i < t.rows.numel(); ++i) sums[0] += t.rows.as<float>()[i];
  }
  test_world().all_reduce_sum(sums, 1);
  for (const std::string& name : file.datasets()) {
    if (name == "/model/model.embed_tokens.weight") {
      EXPECT_EQ(file.dataset(name).shape, (std::vector<int64_t>{37, 20}));
    }
    if (!name.starts_with("/optim/exp_avg_sq/")) continue;
    const std::vector<int64_t> shape = file.dataset(name).shape;
    std::vector<float> all(Shape(shape.begin(), shape.end()).numel());
    file.read(name, 0, std::span<float>(all));
    for (const float v : all) sums[1] += v;
  }
  EXPECT_GT(sums[0], 0);
  EXPECT_NEAR(sums[0], sums[1], 1e-9 * sums[0]);
}

TEST(Checkpointer, NonFiniteValuesAreNeverSaved) {
  for (const bool async : {false, true}) {
    const SharedFolder folder;
    TrainedModel run;
    Checkpointer checkpointer = run.checkpointer(folder, async);
    checkpointer.save(run.state(1));
    checkpointer.finish();
    // The last row of the embedding or, where a rank has none, any rank's that has one.
    const Tensor rows = run.engine->model().unit(0).exp_avg(0);
    if (rows.numel() > 0) rows.as<float>()[rows.numel() - 1] = std::nanf("");
    const std::string error = agreed_error([&] {
      checkpointer.save(run.state(2));
      checkpointer.finish();
    });
    EXPECT_TRUE(has(error, {"/optim/exp_avg/", "not finite", "step 2"}));
    EXPECT_EQ(folder.names(), std::vector<std::string>{"step-00000001.h5"});
    EXPECT_TRUE(verify_checkpoint(world(), folder.checkpoint(1)).empty());
  }
}

TEST(Checkpointer, ASnapshotIsWhatIsSavedInTheBackground) {
  const SharedFolder background, foreground;
  TrainedModel run;
  run.steps(1, 2);
  Checkpointer now = run.checkpointer(foreground, false);
  now.save(run.state(2));
  EXPECT_TRUE(now.take_report().has_value());
  Checkpointer later = run.checkpointer(background, true);
  later.save(run.state(2));
  run.steps(3, 6);  // changes every weight meanwhile
  later.finish();
  const auto report = later.take_report();
  ASSERT_TRUE(report.has_value());
  EXPECT_EQ(report->step, 2);
  EXPECT_FALSE(later.take_report().has_value());
  const Hdf5File a = Hdf5File::open(foreground.checkpoint(2));
  const Hdf5File b = Hdf5File::open(background.checkpoint(2));
  ASSERT_EQ(a.datasets(), b.datasets());
  for (const std::string& name : a.datasets())
    EXPECT_EQ(a.int_attribute("xxh3_rows", name), b.int_attribute("xxh3_rows", name)) << name;
  EXPECT_TRUE(verify_checkpoint(world(), background.checkpoint(2)).empty());
}

TEST(Checkpointer, AFailedBackgroundSaveIsAnError) {
  const SharedFolder folder;
  TrainedModel run;
  Checkpointer checkpointer = run.checkpointer(folder, true);
  checkpointer.save(run.state(1));
  checkpointer.finish();
  EXPECT_FALSE(checkpointer.failed());
  {
    const Limit limit(RLIMIT_FSIZE, 4096, world().rank() == world().size() - 1);
    checkpointer.save(run.state(2));
    const std::string error = agreed_error([&] { checkpointer.finish(); });
    EXPECT_TRUE(has(error, {"step 2", "older ones are intact"}));
    EXPECT_TRUE(checkpointer.failed());
  }
  EXPECT_EQ(folder.names(), std::vector<std::string>{"step-00000001.h5"});
}

// An exception elsewhere leaves while a save is under way: its file is complete afterwards.
TEST(Checkpointer, WaitsWhenItIsDestroyed) {
  const SharedFolder folder;
  TrainedModel run;
  {
    Checkpointer checkpointer = run.checkpointer(folder, true);
    checkpointer.save(run.state(5));
  }
  EXPECT_TRUE(verify_checkpoint(world(), folder.checkpoint(5)).empty());
}

}  // namespace
}  // namespace qshard
