#include "device/counting_backend.h"

#include <cstring>

namespace qshard {
namespace {

constexpr uintptr_t kFirst = uintptr_t{1} << 60;  // above all that the host can address

class CountingDevice final : public Device {
 public:
  explicit CountingDevice(bool has_host) {
    if (has_host) host_ = std::make_unique<CountingDevice>(false);
  }
  std::string name() const override { return "planned"; }
  Device& host() override { return host_ ? *host_ : *this; }
  void* allocate(size_t bytes) override {
    const uintptr_t address = next_;
    next_ += (bytes + 63) / 64 * 64;
    return reinterpret_cast<void*>(address);
  }
  void release(void*, size_t) noexcept override {}
  void copy(void* to, const void*, size_t bytes) override {
    if (reinterpret_cast<uintptr_t>(to) < kFirst) std::memset(to, 0, bytes);
  }
  void zero(void*, size_t) override {}

 private:
  std::unique_ptr<CountingDevice> host_;
  uintptr_t next_ = kFirst;
};

class CountingOps final : public Ops {
 public:
  explicit CountingOps(Device& device) {
    if (!device.is_host())
      products_ = Buffer(device, DType::u8, {kGpuProductBytes}, Segment::workspace, "products");
  }
  void linear(Tensor, Tensor, Tensor) override {}
  void linear_dgrad(Tensor, Tensor, Tensor, bool) override {}
  void linear_wgrad(Tensor, Tensor, Tensor, bool) override {}
  void embedding(Tensor, Tensor, Tensor) override {}
  void embedding_grad(Tensor, Tensor, Tensor) override {}
  void rms_norm(Tensor, Tensor, float, Tensor, Tensor) override {}
  void add_rms_norm(Tensor, Tensor, Tensor, float, Tensor, Tensor, Tensor) override {}
  void add(Tensor, Tensor, Tensor) override {}
  void rms_norm_grad(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool) override {}
  void qk_norm_rope(Tensor, Tensor, Tensor, Tensor, float, AttentionShape, Tensor,
                    Tensor) override {}
  void qk_norm_rope_grad(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, AttentionShape, Tensor,
                         Tensor, Tensor, bool) override {}
  void attention(Tensor, Tensor, Tensor, AttentionShape, Tensor, Tensor) override {}
  void attention_grad(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, AttentionShape, Tensor,
                      Tensor, Tensor) override {}
  void swiglu(Tensor, Tensor) override {}
  void swiglu_grad(Tensor, Tensor, Tensor) override {}
  void cross_entropy(Tensor, Tensor, Factor, Tensor, Tensor) override {}
  void adamw(Tensor, Tensor, Tensor, Tensor, Tensor, const AdamWStep&) override {}
  void add_sum(Tensor, Tensor) override {}
  void add_sum_squares(Tensor, Tensor) override {}
  void cast(Tensor, Tensor) override {}
  void sum_parts(std::span<const Tensor>, Factor, Tensor, bool) override {}
  void init_normal(Tensor, uint64_t, uint64_t, int64_t, float) override {}
  void fill(Tensor, float) override {}
  double measure_peak(DType, double) override { return 0; }

 private:
  Buffer products_;
};

}  // namespace

Backend make_counting_backend(bool has_host) {
  Backend backend;
  backend.device = std::make_unique<CountingDevice>(has_host);
  backend.ops = std::make_unique<CountingOps>(*backend.device);
  return backend;
}

}  // namespace qshard
