// One wrong byte anywhere in a checkpoint: every reader says so and names the file, or what it
// reads is right to the bit. A crash or a hang ends this program, which is a failure too.
#include <sys/resource.h>

#include "../test_main.h"
#include "files.h"
#include "tiny_checkpoint.h"
#include "train/ckpt_tools.h"

namespace qshard {
namespace {

class CheckpointBytesTest : public testing::Test {
 protected:
  CheckpointBytesTest() {
    state_.step = 7, state_.samples = 84, state_.seed = 5;
    state_.loss_scale = 1024, state_.growth_tracker = 17;
    state_.model = tiny_config().to_json();
    for (int i = 0; i < 50; ++i) state_.run["section"][fmt::format("key{}", i)] = "a value";
    SaveOptions dense;
    dense.alignment = 1;
    path_ = save_checkpoint(test_world(), folder_ / "", state_, good_.list, dense).path;
    bytes_ = read_text(path_);
  }

  // Empty when fn refuses with an error that names the file, or is content.
  std::string fault_of(const std::function<std::string()>& fn) const {
    try {
      return fn();
    } catch (const Error& error) {
      const std::string text = error.what();
      return text.find(path_) == std::string::npos ? "error without the file: " + text : "";
    } catch (const std::exception& error) {
      return fmt::format("not an Error: {}", error.what());
    }
  }

  std::string read_state() const {
    (void)describe_checkpoint(path_).dump();
    const CheckpointState s = read_checkpoint_state(path_);
    const bool same = s.step == 7 && s.samples == 84 && s.seed == 5 && s.loss_scale == 1024 &&
                      s.growth_tracker == 17 && s.model == state_.model && s.run == state_.run;
    return same ? "" : "another state";
  }
  std::string check() const {
    (void)verify_checkpoint(test_world(), path_);
    (void)check_checkpoint(test_world(), path_);
    return "";
  }
  std::string load() {
    TinyTensors found(0);
    load_checkpoint(test_world(), path_, found.list, false);
    ++loaded_;
    return found.memory == good_.memory ? "" : "other values";
  }

  // What goes wrong with this byte changed.
  std::string fault_with(size_t position, uint8_t change) {
    std::string damaged = bytes_;
    damaged[position] = static_cast<char>(damaged[position] ^ change);
    write_text(path_, damaged);
    std::string faults;
    for (const std::string& fault :
         {fault_of([&] { return read_state(); }), fault_of([&] { return check(); }),
          fault_of([&] { return load(); })})
      if (!fault.empty()) faults += fault + "; ";
    return faults;
  }

  TempDir folder_;
  CheckpointState state_;
  const TinyTensors good_{0.25f};
  std::string path_, bytes_;
  int loaded_ = 0;
};

int64_t peak_megabytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss / 1024;
}

TEST_F(CheckpointBytesTest, AWrongByteIsNoticedOrDoesNotMatter) {
  EXPECT_EQ(load(), "");
  const int64_t before = peak_megabytes();
  // QSHARD_EVERY_BYTE=1: all bytes, each with all bits.
  const bool every = std::getenv("QSHARD_EVERY_BYTE") != nullptr;
  int tried = 0;
  for (size_t position = 0; position < bytes_.size(); position += every ? 1 : 19)
    for (int bit = every ? 0 : static_cast<int>(position % 8); bit < 8; bit += every ? 1 : 8) {
      const std::string fault = fault_with(position, static_cast<uint8_t>(1 << bit));
      EXPECT_EQ(fault, "") << "byte " << position << " bit " << bit;
      ++tried;
    }
  EXPECT_LT(loaded_, tried / 2);  // most bytes matter
  EXPECT_LT(peak_megabytes() - before, 300);
}

TEST_F(CheckpointBytesTest, TheCheckItselfNoticesOtherValues) {
  state_.run["section"]["key1"] = "another value";
  EXPECT_EQ(fault_of([&] { return read_state(); }), "another state");
  const_cast<float&>(good_.memory[3][0]) += 1;
  EXPECT_EQ(fault_of([&] { return load(); }), "other values");
  EXPECT_NE(fault_of([]() -> std::string { fail("nothing"); }), "");
}

}  // namespace
}  // namespace qshard
