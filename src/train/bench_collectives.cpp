#include <algorithm>
#include <cstring>
#include <functional>

#include "backends.h"
#include "fsdp/shard_layout.h"
#include "model/qwen3_params.h"
#include "train/bench.h"
#include "train/stopwatch.h"

namespace qshard {
namespace {

// Whole numbers below 16: bf16 holds them, and f32 their sums over any ranks, exactly and in any
// order. Depends on the element of the rank's part, so that misplaced values show.
float value_of(int rank, int64_t index) { return static_cast<float>((7 * index + 3 * rank) % 16); }

float sum_of(int ranks, int64_t index) {
  float sum = 0;
  for (int r = 0; r < ranks; ++r) sum += value_of(r, index);
  return sum;
}

uint16_t fp16_bits(int value) {  // of a whole number below 16
  if (value == 0) return 0;
  int exponent = 0;
  while ((value >> exponent) > 1) ++exponent;
  return static_cast<uint16_t>((exponent + 15) << 10 | ((value << (10 - exponent)) & 0x3FF));
}

// Such a number in a parameter dtype.
void put(DType dtype, float value, char* to) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  uint16_t half = static_cast<uint16_t>(bits >> 16);
  if (dtype == DType::fp16) half = fp16_bits(static_cast<int>(value));
  if (dtype == DType::f32)
    std::memcpy(to, &value, sizeof value);
  else
    std::memcpy(to, &half, sizeof half);
}

// One unit of a transport, moved again and again.
class MovedUnit {
 public:
  MovedUnit(const BenchOptions& o, const UnitLayout& layout, World& world, Backend& backend)
      : world_(world),
        device_(*backend.device),
        layout_(layout),
        dtype_(parse_dtype(o.param_dtype)),
        transport_(make_transport(o.transport, world, backend, 1)) {
    transport_->add_unit({"measured", layout.pieces(), layout.elements(), dtype_,
                          parse_dtype(o.reduce_dtype), true, true});
    transport_->finish_setup();
    for (int p = 0; p < layout.size(); ++p)
      sums_.emplace_back(device_, DType::f32, Shape{layout[p].piece().count}, Segment::gradients,
                         "sums");
    std::vector<float> gradient(static_cast<size_t>(layout.elements()));
    for (int64_t i = 0; i < layout.elements(); ++i) gradient[i] = value_of(world.rank(), i);
    gradient_ = Buffer(device_, DType::f32, {layout.elements()}, Segment::workspace, "gradient");
    device_.copy(gradient_->data, gradient.data(), gradient_->bytes());
    fill_shards();
  }

  void gather() {  // as after an update: the shard is new, and everybody needs it
    transport_->publish(0);
    transport_->gather_start(0);
    full_ = static_cast<char*>(transport_->gather_wait(0));
    transport_->reshard(0);
  }
  void reduce() {
    transport_->reduce_start(0);
    const std::vector<Tensor> sums(sums_.begin(), sums_.end());
    transport_->reduce_wait(0, sums, 1, false);
  }
  void fill_gradient() {
    device_.copy(transport_->grad_buffer(0), gradient_->data, gradient_->bytes());
  }

  // Elements of all ranks that are not what they have to be. `spoil`: rank 0 finds one more.
  int64_t wrong_after_gather(bool spoil);
  int64_t wrong_after_reduce(bool spoil);

 private:
  void fill_shards();
  int64_t agreed(int64_t wrong) const {
    world_.all_reduce_sum(&wrong, 1);
    return wrong;
  }
  bool spoils(bool spoil) const { return spoil && world_.rank() == 0; }

  World& world_;
  Device& device_;
  const UnitLayout& layout_;
  DType dtype_;
  std::unique_ptr<Collectives> transport_;
  std::vector<Buffer> sums_;
  Buffer gradient_;
  char* full_ = nullptr;
};

void MovedUnit::fill_shards() {
  const size_t size = dtype_size(dtype_);
  for (int p = 0; p < layout_.size(); ++p) {
    const Tensor shard = transport_->shard(0, p);
    std::vector<char> bytes(shard.bytes());
    for (int64_t i = 0; i < shard.numel(); ++i)
      put(dtype_, value_of(world_.rank(), i), bytes.data() + i * static_cast<int64_t>(size));
    device_.copy(shard.data, bytes.data(), bytes.size());
  }
}

int64_t MovedUnit::wrong_after_gather(bool spoil) {
  const size_t size = dtype_size(dtype_);
  transport_->gather_start(0);
  full_ = static_cast<char*>(transport_->gather_wait(0));
  std::vector<char> found(static_cast<size_t>(layout_.elements()) * size);
  device_.copy(found.data(), full_, found.size());
  transport_->reshard(0);
  if (spoils(spoil)) found[static_cast<size_t>(layout_[0].piece().offset) * size + 1] ^= 0x40;
  int64_t wrong = 0;
  for (int p = 0; p < layout_.size(); ++p) {
    const Piece piece = layout_[p].piece();
    for (int64_t i = 0; i < piece.count * world_.size(); ++i) {
      char expected[4];
      put(dtype_, value_of(static_cast<int>(i / piece.count), i % piece.count), expected);
      const char* at = found.data() + (piece.offset + i) * static_cast<int64_t>(size);
      wrong += std::memcmp(at, expected, size) != 0;
    }
  }
  return agreed(wrong);
}

int64_t MovedUnit::wrong_after_reduce(bool spoil) {
  int64_t wrong = 0;
  for (int p = 0; p < layout_.size(); ++p) {
    const ParamLayout& param = layout_[p];
    const int64_t count = param.piece().count, first = param.offset + world_.rank() * count;
    std::vector<float> sums(static_cast<size_t>(count));
    device_.copy(sums.data(), sums_[p]->data, sums_[p]->bytes());
    if (p == 0 && spoils(spoil)) sums[0] += 1;
    const int64_t own = param.numel_of(world_.rank());  // padding may be anything
    for (int64_t i = 0; i < own; ++i) wrong += sums[i] != sum_of(world_.size(), first + i);
  }
  return agreed(wrong);
}

// As nccl-tests define them: `bytes` of the whole unit, all ranks' parts together.
Document line_of(const char* operation, const std::string& unit, int64_t bytes, const Times& times,
                 int64_t wrong, int ranks) {
  const double rate = static_cast<double>(bytes) / times.median;
  return {{"operation", operation},
          {"unit", unit},
          {"bytes", bytes},
          {"time_us", times.median * 1e6},
          {"lowest_us", times.lowest * 1e6},
          {"highest_us", times.highest * 1e6},
          {"algbw_gb_per_s", rate * 1e-9},
          {"busbw_gb_per_s", rate * 1e-9 * (ranks - 1) / ranks},
          {"wrong", wrong}};
}

void measure(const BenchOptions& o, bool spoil, const std::string& name, const UnitLayout& layout,
             World& world, Backend& backend, Document& rows) {
  MovedUnit unit(o, layout, world, backend);
  int64_t elements = 0;
  for (const Piece& piece : layout.pieces()) elements += piece.count * world.size();
  auto bytes = [&](const std::string& dtype) {
    return elements * static_cast<int64_t>(dtype_size(parse_dtype(dtype)));
  };
  Stopwatch watch(world, *backend.device, o.warm_up, o.repeats);
  const Times gather = times_of(watch.time([&] { unit.gather(); }), o.warm_up);
  rows.push_back(line_of("all-gather", name, bytes(o.param_dtype), gather,
                         unit.wrong_after_gather(spoil), world.size()));
  const Times reduce =
      times_of(watch.time([&] { unit.reduce(); }, [&] { unit.fill_gradient(); }), o.warm_up);
  rows.push_back(line_of("reduce-scatter", name, bytes(o.reduce_dtype), reduce,
                         unit.wrong_after_reduce(spoil), world.size()));
}

}  // namespace

Document bench_collectives(const BenchOptions& options, const SweepOptions& sweep, World& world,
                           Backend& backend) {
  const Qwen3Config config = bench_model(options);
  std::vector<std::pair<std::string, UnitLayout>> units;
  units.emplace_back("root", UnitLayout(root_params(config), world.size()));
  units.emplace_back("layer", UnitLayout(layer_params(config, 0), world.size()));
  const int64_t width = static_cast<int64_t>(dtype_size(parse_dtype(options.param_dtype)));
  for (int64_t bytes = sweep.from_bytes; bytes <= sweep.to_bytes; bytes *= sweep.factor)
    units.emplace_back(
        "-", UnitLayout({{"sweep", {std::max<int64_t>(1, bytes / width)}}}, world.size()));
  std::vector<std::string> transports = {options.transport.name};
  if (options.transport.name == "auto")
    transports = options.backend == "cuda" ? std::vector<std::string>{"nccl", "mpi-cuda"}
                                           : std::vector<std::string>{"shm", "mpi"};
  Document doc = {{"wrong", 0}, {"rows", Document::array()}};
  int64_t wrong = 0;
  for (const std::string& transport : transports) {
    BenchOptions o = options;
    o.transport.name = transport;
    Document rows = Document::array();
    for (const auto& [name, layout] : units)
      measure(o, sweep.spoil, name, layout, world, backend, rows);
    for (const Document& row : rows) {
      Document line = {{"transport", transport}};
      line.update(row);
      wrong += row["wrong"].get<int64_t>();
      doc["rows"].push_back(line);
    }
  }
  doc["wrong"] = wrong;
  return doc;
}

}  // namespace qshard
