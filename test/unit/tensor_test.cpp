#include "tensor/tensor.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "../test_main.h"
#include "cpu/backend_cpu.h"
#include "device/staging.h"

namespace qshard {
namespace {

TEST(DType, NamesAndSizes) {
  for (DType dtype : {DType::f32, DType::bf16, DType::fp16, DType::f64, DType::i32, DType::u32,
                      DType::u16, DType::u8})
    EXPECT_EQ(parse_dtype(dtype_name(dtype)), dtype);
  EXPECT_EQ(dtype_size(DType::bf16), 2u);
  EXPECT_EQ(dtype_size(DType::f64), 8u);
  EXPECT_THROW(parse_dtype("float"), Error);
}

TEST(Shape, Counts) {
  const Shape s{3, 4, 5};
  EXPECT_EQ(s.numel(), 60);
  EXPECT_EQ(s.row_numel(), 20);
  EXPECT_EQ(s.str(), "[3, 4, 5]");
  EXPECT_EQ(s, Shape(s.begin(), s.end()));
  EXPECT_FALSE(s == Shape({3, 4}));
  EXPECT_EQ(Shape({7}).row_numel(), 1);
  EXPECT_EQ(Shape({0, 4}).numel(), 0);
  EXPECT_THROW(Shape({1, 2, 3, 4, 5}), Error);
  EXPECT_THROW(Shape({-1}), Error);
}

TEST(Tensor, ViewsPointWhereTheySay) {
  float data[24];
  const Tensor t = Tensor::of(data, {4, 6});
  EXPECT_EQ(t.bytes(), sizeof data);
  EXPECT_TRUE(t.contiguous());
  EXPECT_EQ(t.row_range(1, 3).data, data + 6);
  EXPECT_EQ(t.row_range(1, 3).rows(), 2);
  const Tensor columns = t.col_range(2, 5);
  EXPECT_EQ(columns.data, data + 2);
  EXPECT_EQ(columns.ld, 6);
  EXPECT_FALSE(columns.contiguous());
  EXPECT_TRUE(columns.row_range(3, 4).contiguous());
  EXPECT_EQ(columns.row_range(3, 4).data, data + 20);
  EXPECT_EQ(t.reshape({2, 12}).ld, 12);
  EXPECT_THROW(columns.reshape({12}), Error);
  EXPECT_THROW(t.reshape({5, 5}), Error);
  EXPECT_THROW(t.row_range(3, 5), Error);
  EXPECT_THROW(t.col_range(4, 3), Error);
  EXPECT_THROW(t.as<int32_t>(), Error);
  EXPECT_EQ(t.as<float>(), data);
}

Tensor concat(std::vector<Tensor> parts) { return concat_rows_if_adjacent(parts); }

TEST(Tensor, ConcatOnlyWhatIsAdjacent) {
  float data[60];
  const Tensor a = Tensor::of(data, {2, 6}), b = Tensor::of(data + 12, {3, 6}),
               c = Tensor::of(data + 30, {1, 6});
  const Tensor all = concat({a, b, c});
  EXPECT_EQ(all.data, data);
  EXPECT_EQ(all.rows(), 6);
  EXPECT_FALSE(concat({a, c}));
  EXPECT_FALSE(concat({b, a}));
  EXPECT_FALSE(concat({a, Tensor::of(data + 12, {2, 5})}));
}

// --- the CPU device
TEST(CpuDevice, AlignedZeroedAndAccounted) {
  Device& device = *test_backend().device;
  const int64_t before = device.bytes_held(Segment::moments);
  {
    Buffer small(device, DType::f32, {3, 5}, Segment::moments, "small");
    Buffer large(device, DType::u8, {3 << 20}, Segment::moments, "large");
    EXPECT_EQ(reinterpret_cast<uintptr_t>(small->data) % 64, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(large->data) % (2 << 20), 0u);
    for (int64_t i = 0; i < large->numel(); i += 997) EXPECT_EQ(large->as<uint8_t>()[i], 0);
    for (int i = 0; i < 15; ++i) EXPECT_EQ(small->as<float>()[i], 0.f);
    EXPECT_EQ(device.bytes_held(Segment::moments) - before, 60 + (3 << 20));
    EXPECT_GE(device.bytes_peak(), device.bytes_held());

    Buffer moved(std::move(small));
    EXPECT_FALSE(small.tensor());
    EXPECT_EQ(moved->numel(), 15);
    moved = std::move(large);
    EXPECT_EQ(device.bytes_held(Segment::moments) - before, 3 << 20);
  }
  EXPECT_EQ(device.bytes_held(Segment::moments), before);
  Buffer empty(device, DType::f32, {0, 5}, Segment::shards, "empty");
  EXPECT_EQ(empty->data, nullptr);
}

int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(CpuDevice, PartOfAHugePageTakesNoWholeOne) {
  Device& device = *test_backend().device;
  constexpr int64_t kHugePage = 2 << 20, kBuffers = 32;
  const int64_t before = resident_bytes();
  std::vector<Buffer> buffers;
  for (int64_t i = 0; i < kBuffers; ++i)
    buffers.emplace_back(device, DType::u8, Shape{kHugePage + 64}, Segment::workspace, "part");
  const int64_t taken = resident_bytes() - before;
  EXPECT_GE(taken, kBuffers * kHugePage * 9 / 10);
  EXPECT_LE(taken, kBuffers * kHugePage * 3 / 2);
}

// Memory that was used before comes back zeroed.
TEST(CpuDevice, ReusedMemoryIsZero) {
  Device& device = *test_backend().device;
  for (int round = 0; round < 3; ++round) {
    Buffer b(device, DType::u8, {1000}, Segment::workspace, "reused");
    for (int i = 0; i < 1000; ++i) ASSERT_EQ(b->as<uint8_t>()[i], 0);
    std::memset(b->data, 0xff, 1000);
  }
}

TEST(CpuDevice, CopyAndZero) {
  Device& device = *test_backend().device;
  char from[] = "abc", to[4];
  device.copy(to, from, 4);
  EXPECT_STREQ(to, "abc");
  device.zero(to, 3);
  EXPECT_EQ(to[2], 0);
}

TEST(CpuDevice, StagesNothing) {
  Device& device = *test_backend().device;
  EXPECT_TRUE(device.is_host());
  EXPECT_EQ(&device.host(), &device);
  float x[] = {1, 2, 3};
  const int64_t before = device.bytes_held();
  Staging of_device(device), of_host;
  for (Staging* staging : {&of_device, &of_host}) {
    EXPECT_EQ(staging->read(Tensor::of(x, {3})).data(), x);
    staging->write(Tensor::of(x, {3}), [&](std::span<float> values) {
      EXPECT_EQ(values.data(), x);
      EXPECT_EQ(values.size(), 3u);
    });
  }
  EXPECT_EQ(device.bytes_held(), before);
  Tensor apart = Tensor::of(x, {2, 1});
  apart.ld = 2;
  EXPECT_THROW(of_host.read(apart), Error);
}

class FullDevice : public Device {
 public:
  std::string name() const override { return "full"; }
  void* allocate(size_t) override { return nullptr; }
  void release(void*, size_t) noexcept override {}
  void copy(void*, const void*, size_t) override {}
  void zero(void*, size_t) override {}
};

TEST(Buffer, OutOfMemoryNamesTheBuffer) {
  FullDevice device;
  try {
    Buffer b(device, DType::f32, {8}, Segment::params, "layer 7");
    FAIL() << "no memory, and no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("layer 7"), std::string::npos);
  }
  EXPECT_EQ(device.bytes_held(), 0);
}

// The operators' scratch goes back to the device it came from.
TEST(CpuBackend, CanBeReplaced) {
  Backend backend = make_cpu_backend(1);
  float x[64] = {}, dw[8] = {}, rstd[8] = {};
  const Tensor t = Tensor::of(x, {8, 8});
  backend.ops->rms_norm_grad(t, t, Tensor::of(dw, {8}), Tensor::of(rstd, {8}), t, {},
                             Tensor::of(dw, {8}), false);
  EXPECT_GT(backend.device->bytes_held(Segment::workspace), 0);
  backend = make_cpu_backend(2);
  EXPECT_EQ(backend.device->bytes_held(Segment::workspace), 0);
}

// Copies for a save in the background: of several threads that wait for them, each makes some, and
// none goes on before the last is made.
TEST(CpuBackend, DownloadsAreMadeWhenTheyAreWaitedFor) {
  const Backend backend = make_cpu_backend(1);
  Device& device = *backend.device;
  device.download_wait();  // nothing was started
  constexpr int64_t n = (8 << 20) / sizeof(float) + 3;
  const Buffer from(device, DType::f32, {n}, Segment::workspace, "from");
  const Buffer to(device, DType::f32, {n}, Segment::workspace, "to");
  for (int round = 1; round < 100; ++round) {
    std::fill_n(from->as<float>(), n, static_cast<float>(round));
    device.download_start(to->data, from->data, from->bytes());
    device.download_start(to->data, from->data, 0);
    std::atomic<bool> running = false;
    std::thread saver([&] { running = true, device.download_wait(); });
    while (!running) std::this_thread::yield();
    device.order(Queue::downloads, Queue::operators);
    std::fill_n(from->as<float>(), n, -1.0f);
    EXPECT_EQ(std::count(to->as<float>(), to->as<float>() + n, static_cast<float>(round)), n);
    saver.join();
  }
}

TEST(CpuBackend, NamesItself) {
  EXPECT_EQ(make_cpu_backend(1).device->name().substr(0, 3), "cpu");
  EXPECT_THROW(make_cpu_backend(0), Error);
}

}  // namespace
}  // namespace qshard
