#include "comm/counting_collectives.h"

#include "comm/private_collectives.h"
#include "device/counting_backend.h"

namespace qshard {
namespace {

constexpr int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Where memory goes that a transport with shared buffers does not have.
std::shared_ptr<Device> nowhere() { return std::move(make_counting_backend().device); }

class CountingCollectives final : public PrivateCollectives {
 public:
  CountingCollectives(const std::string& transport, const World& world, Backend& backend,
                      int full_buffers)
      : PrivateCollectives(transport, world, backend, full_buffers,
                           transport == "nccl" ? 1 : world.size(),
                           transport == "shm" ? nowhere() : nullptr),
        shared_(transport == "shm"),
        nodes_(world.nodes()),
        transport_(transport) {}
  std::string name() const override { return transport_; }

 private:
  void allocated() override {
    if (shared_) account_shared();
  }
  // As [Note: Shared-memory transport] lays it out: a rank's rows and its wards' in the node's
  // window, gradient slots and counters in its own, and what goes between nodes.
  void account_shared() {
    const int64_t wards = nodes_ - 1, slots = static_cast<int64_t>(table().slots().size());
    int64_t shards = 0, gradients = 0, communication = (3 * table().size() + 2 * slots) * 64;
    for (int u = 0; u < table().size(); ++u)
      shards += bytes_of(table().shard_elements(u), table().spec(u).param_dtype);
    for (const GradSlot& slot : table().slots())
      for (const int64_t bytes :
           {bytes_of(slot.elements, DType::f32), bytes_of(slot.rounded_elements, DType::bf16)}) {
        gradients += bytes;
        communication += round_up(bytes) - bytes;
      }
    if (nodes_ > 1)
      for (const GradSlot& slot : table().slots())
        communication += bytes_of((nodes_ + wards) * slot.packed_elements, DType::f32);
    Device& device = *backend_.device;
    device.account(Segment::shards, shards);
    device.account(Segment::params, wards * shards);
    device.account(Segment::gradients, gradients);
    device.account(Segment::communication, communication);
  }

  void start_gather(int, int) override {}
  void wait_gather(int, int) override {}
  void start_reduce(int, int) override {}
  void wait_reduce(int, int) override {}
  std::vector<Tensor> parts(int unit, int slot, int piece) override {
    return {received_rows(unit, slot, 0, piece)};
  }

  const bool shared_;
  const int64_t nodes_;
  const std::string transport_;
};

}  // namespace

std::unique_ptr<Collectives> make_counting_collectives(const std::string& transport,
                                                       const World& world, Backend& backend,
                                                       int full_buffers) {
  return std::make_unique<CountingCollectives>(transport, world, backend, full_buffers);
}

}  // namespace qshard
