#include <thread>

#include "cuda/check_cuda.h"
#include "cuda/choose_device.h"
#include "cuda_ops_reference.h"
#include "device/staging.h"

namespace qshard {
namespace {

using cuda::choose_device;

std::string error_text(int local_rank, int local_size, int visible) {
  try {
    choose_device(local_rank, local_size, visible);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ChooseDevice, OneVisibleIsOnes) {
  EXPECT_EQ(choose_device(3, 4, 1), 0);
  EXPECT_EQ(choose_device(0, 1, 1), 0);
}

TEST(ChooseDevice, InTheOrderOfTheRanks) {
  EXPECT_EQ(choose_device(3, 4, 4), 3);
  EXPECT_EQ(choose_device(0, 4, 4), 0);
  EXPECT_EQ(choose_device(1, 2, 8), 1);
}

TEST(ChooseDevice, TooFewNamesTheSlurmOption) {
  for (int rank : {0, 3}) {
    const std::string text = error_text(rank, 4, 2);
    EXPECT_NE(text.find("only 2 GPUs"), text.npos) << text;
    EXPECT_NE(text.find("--gpus-per-node=4"), text.npos) << text;
  }
  EXPECT_NE(error_text(0, 2, 0).find("sees no GPU"), std::string::npos);
}

TEST(CudaDevice, NameTellsTheModelAndItsPlace) {
  auto& device = static_cast<cuda::CudaDevice&>(*cuda_backend().device);
  EXPECT_NE(device.name().find("sm_"), std::string::npos) << device.name();
  EXPECT_NE(device.name().find(device.pci_bus_id()), std::string::npos) << device.name();
  EXPECT_THROW(cuda::CudaDevice(1000), Error);
}

TEST(CudaDevice, MemoryIsAlignedAndZero) {
  Device& device = *cuda_backend().device;
  for (size_t bytes : {size_t{1}, size_t{1000}}) {
    void* data = device.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0u);
    std::vector<char> host(bytes, 1);
    device.copy(host.data(), data, bytes);
    EXPECT_EQ(host, std::vector<char>(bytes, 0));
    device.release(data, bytes);
  }
  EXPECT_EQ(device.allocate(0), nullptr);
}

// Several pieces of pinned memory, both ways, and copies that need none.
TEST(CudaDevice, CopiesInEveryDirection) {
  Device& device = *cuda_backend().device;
  constexpr int64_t n = (10 << 20) + 7;
  std::vector<char> bytes(n), back(n, 0), pageable(n, 0);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 + i / 1000);
  Buffer a(device, DType::u8, {n}, Segment::workspace, "a"),
      b(device, DType::u8, {n}, Segment::workspace, "b");
  device.copy(a->data, bytes.data(), n);
  device.copy(b->data, a->data, n);
  device.copy(back.data(), b->data, n);
  EXPECT_TRUE(back == bytes);
  device.copy(pageable.data(), bytes.data(), n);
  EXPECT_TRUE(pageable == bytes);

  const Buffer pinned(device.host(), DType::u8, {n}, Segment::workspace, "pinned");
  device.copy(pinned->data, a->data, n);
  EXPECT_EQ(std::memcmp(pinned->data, bytes.data(), n), 0);
  device.zero(a->data, n);
  device.copy(b->data, pinned->data, n);
  device.copy(back.data(), a->data, n);
  EXPECT_TRUE(back == std::vector<char>(n, 0));
  device.copy(back.data(), b->data, n);
  EXPECT_TRUE(back == bytes);
}

TEST(CudaDevice, HostMemoryIsAnothersAndZero) {
  Device& device = *cuda_backend().device;
  EXPECT_FALSE(device.is_host());
  EXPECT_TRUE(device.host().is_host());
  const int64_t before = device.bytes_held();
  const Buffer pinned(device.host(), DType::f32, {1000}, Segment::workspace, "pinned");
  EXPECT_EQ(device.bytes_held(), before);
  EXPECT_GE(device.host().bytes_held(), 4000);
  for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(pinned->as<float>()[i], 0);
  EXPECT_EQ(device.host().allocate(0), nullptr);
}

// What operators before the start wrote arrives, what comes after the wait does not; meanwhile
// others run.
TEST(CudaDevice, DownloadsRunBesideOperators) {
  Device& device = *cuda_backend().device;
  constexpr int64_t n = 5000;
  Twin x = Twin::random(DType::f32, 1, n, 1), y(DType::f32, 1, n);
  const Buffer to(device.host(), DType::f32, {2 * n}, Segment::workspace, "to");
  device.download_wait();  // nothing was started
  for (float value = 1; value <= 20; ++value) {
    cuda_ops().fill(x.gpu_vector(), value);
    device.download_start(to->data, x.gpu().data, n * sizeof(float));
    device.download_start(to->as<float>() + n, x.gpu().data, n * sizeof(float));
    device.download_start(to->data, x.gpu().data, 0);
    cuda_ops().fill(y.gpu_vector(), 2 * value);
    if (value > 10)
      std::thread([&] { device.download_wait(); }).join();
    else
      device.download_wait();
    cuda_ops().fill(x.gpu_vector(), -1);
    EXPECT_EQ(Floats(to->as<float>(), to->as<float>() + 2 * n), Floats(2 * n, value));
    EXPECT_EQ(y.download(), Floats(n, 2 * value));
  }
}

TEST(CudaDevice, StagingReadsAndWrites) {
  Device& device = *cuda_backend().device;
  Twin x = Twin::random(DType::f32, 1, 1000, 1);
  Staging staging(device);
  for (const auto& [begin, end] : {std::pair{0, 10}, {0, 1000}, {7, 7}, {990, 1000}}) {
    const std::span<const float> values = staging.read(x.gpu_vector().row_range(begin, end));
    EXPECT_EQ(Floats(values.begin(), values.end()),
              Floats(x.host().begin() + begin, x.host().begin() + end));
  }
  Floats expected = x.host();
  std::fill(expected.begin() + 3, expected.begin() + 700, 5.f);
  staging.write(x.gpu_vector().row_range(3, 700), [](std::span<float> values) {
    EXPECT_EQ(values.size(), 697u);
    std::fill(values.begin(), values.end(), 5.f);
  });
  EXPECT_EQ(x.download(), expected);
  EXPECT_THROW(staging.write(x.gpu_vector(), [](std::span<float>) { fail("unreadable"); }), Error);
  EXPECT_EQ(x.download(), expected);
}

TEST(CudaDevice, AccountsMemoryBySegment) {
  Device& device = *cuda_backend().device;
  const int64_t before = device.bytes_held(Segment::shards);
  {
    Buffer a(device, DType::f32, {100}, Segment::shards, "a");
    EXPECT_EQ(device.bytes_held(Segment::shards), before + 400);
  }
  EXPECT_EQ(device.bytes_held(Segment::shards), before);
}

TEST(CudaDevice, OutOfMemoryNamesTheBuffer) {
  Device& device = *cuda_backend().device;
  try {
    Buffer(device, DType::f32, {int64_t{1} << 45}, Segment::moments, "exp_avg");
    FAIL() << "128 TiB allocated";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("exp_avg"), std::string::npos) << error.what();
  }
}

TEST(CudaStreams, EventsOrderThem) {
  auto& device = static_cast<cuda::CudaDevice&>(*cuda_backend().device);
  const cuda::Stream other(cuda::Stream::Priority::high);
  cuda::Event filled, copied;
  Twin x = Twin::random(DType::f32, 1, 1000, 1), y(DType::f32, 1, 1000);
  cuda_ops().fill(x.gpu_vector(), 2);
  filled.record(device.stream());
  filled.make_wait(other);
  ASSERT_EQ(cudaMemcpyAsync(y.gpu().data, x.gpu().data, 4000, cudaMemcpyDeviceToDevice, other),
            cudaSuccess);
  copied.record(other);
  copied.make_wait(device.stream());
  cuda_ops().fill(x.gpu_vector(), 3);
  EXPECT_EQ(y.download(), Floats(1000, 2));
  EXPECT_EQ(x.download(), Floats(1000, 3));
  copied.synchronize();
  EXPECT_TRUE(copied.done());
}

TEST(CudaErrors, NameTheCallAndItsPlace) {
  try {
    CUDA_CHECK(cudaErrorInvalidValue);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("cudaErrorInvalidValue"), std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("device_test.cpp"), std::string::npos) << error.what();
  }
}

// --- the tests' own tools
TEST(Twin, SeesAWriteIntoAGap) {
  Twin x = Twin::random(DType::f32, 3, 5, 1, 2);
  EXPECT_EQ(x.download(), x.host());
  Tensor wider(x.gpu().data, DType::f32, {6});
  cuda_ops().fill(wider, 1);
  EXPECT_FALSE(x.gaps_untouched(x.download_bytes()));
}

TEST(ErrorOf, SeesWrongMissingAndNotFinite) {
  EXPECT_EQ(error_of({1, 2}, {1, 2}), 0);
  EXPECT_NEAR(error_of({1, 2.5}, {1, 2}), 0.25, 1e-12);
  EXPECT_EQ(error_of({1, std::nanf("")}, {1, 2}), HUGE_VAL);
  EXPECT_EQ(error_of({1, INFINITY}, {1, 2}), HUGE_VAL);
  EXPECT_EQ(error_of({1}, {1, 2}), HUGE_VAL);
}

}  // namespace
}  // namespace qshard
