// The transports between GPUs on any number of ranks, driven as a step drives them, but the host
// waits for nothing before the end: what the transports do not order themselves is not ordered.
// Values are small integers, so that every sum is exact.
#include "../test_main.h"
#include "backends.h"
#include "cuda/backend_cuda.h"
#include "fsdp/shard_layout.h"

namespace qshard {
namespace {

constexpr int kSteps = 3;

Backend& gpu() {
  static Backend& backend =
      *new Backend(make_cuda_backend(test_world().node_rank(), test_world().node_size()));
  return backend;
}

float param_value(int unit, int64_t i, int rank, int step) {
  return static_cast<float>((unit * 7 + rank * 3 + i * 5 + step * 11) % 251 - 125);
}
float grad_value(int unit, int64_t i, int rank, int step) {
  return static_cast<float>((unit * 5 + rank * 7 + i + step) % 17 - 8);
}

Buffer on_gpu(int64_t n) {
  return Buffer(*gpu().device, DType::f32, {n}, Segment::workspace, "test");
}

Buffer upload(const std::vector<float>& values) {
  Buffer buffer = on_gpu(static_cast<int64_t>(values.size()));
  gpu().device->copy(buffer->data, values.data(), buffer->bytes());
  return buffer;
}

std::vector<float> download(const Buffer& buffer) {
  std::vector<float> values(buffer->numel());
  gpu().device->copy(values.data(), buffer->data, buffer->bytes());
  return values;
}

UnitSpec make_spec(const std::string& name, const std::vector<Shape>& shapes, DType param_dtype,
                   DType reduce_dtype, bool own_buffers) {
  std::vector<ParamSpec> params;
  for (const Shape& shape : shapes) params.push_back({name, shape});
  const UnitLayout layout(params, test_world().size());
  return {name,         layout.pieces(), layout.elements(), param_dtype,
          reduce_dtype, own_buffers,     own_buffers};
}

// The buffers of one unit in one step; element i of a piece has the value of i, whatever the rank's
// rows are.
struct Step {
  std::vector<Buffer> shard, gradient;  // to be written into the transport's, by piece
  std::vector<Buffer> gathered, gathered_again, reduced;  // what came, by piece
};

class Steps {
 public:
  Steps(const TransportOptions& options, DType param_dtype, DType reduce_dtype)
      : comm_(make_transport(options, test_world(), gpu(), 2)),
        units_({make_spec("root", {{37, 24}, {64}}, param_dtype, reduce_dtype, true),
                make_spec("layers.0", {{7, 5}, {3}, {64, 9}}, param_dtype, reduce_dtype, false),
                make_spec("layers.1", {{1}, {29, 33}}, param_dtype, reduce_dtype, false),
                make_spec("layers.2", {{16, 16}}, param_dtype, reduce_dtype, false)}) {
    for (const UnitSpec& spec : units_) comm_->add_unit(spec);
    comm_->finish_setup();
    for (int s = 0; s < kSteps; ++s)
      for (int u = 0; u < count(); ++u) steps_[s].push_back(prepare(u, s));
  }

  void run() {
    for (int s = 0; s < kSteps; ++s) step(s);
  }

  // The first wrong value, or an empty text.
  std::string wrong() const {
    for (int s = 0; s < kSteps; ++s)
      for (int u = 0; u < count(); ++u)
        for (size_t p = 0; p < units_[u].pieces.size(); ++p) {
          const Step& step = steps_[s][u];
          std::string text = wrong_gather(u, p, s, download(step.gathered[p])) +
                             wrong_gather(u, p, s, download(step.gathered_again[p])) +
                             wrong_reduction(u, p, s, download(step.reduced[p]));
          if (!text.empty()) return text;
        }
    return "";
  }

 private:
  int count() const { return static_cast<int>(units_.size()); }

  Step prepare(int u, int s) const {
    Step step;
    const int rank = test_world().rank(), ranks = test_world().size();
    for (const Piece& piece : units_[u].pieces) {
      std::vector<float> shard(piece.count), gradient(piece.count * ranks);
      for (int64_t i = 0; i < piece.count; ++i) shard[i] = param_value(u, i, rank, s);
      for (int64_t i = 0; i < piece.count * ranks; ++i) gradient[i] = grad_value(u, i, rank, s);
      step.shard.push_back(upload(shard));
      step.gradient.push_back(upload(gradient));
      step.gathered.push_back(on_gpu(piece.count * ranks));
      step.gathered_again.push_back(on_gpu(piece.count * ranks));
      step.reduced.push_back(on_gpu(piece.count));
    }
    return step;
  }

  void step(int s) {
    for (int u = 0; u < count(); ++u) update(u, s);
    comm_->gather_start(0);
    comm_->gather_start(1);
    use(0, s, false);
    for (int l = 1; l < count(); ++l) {
      use(l, s, false);
      if (l + 1 < count()) comm_->gather_start(l + 1);
      comm_->reshard(l);
    }
    comm_->gather_start(count() - 1);
    for (int l = count() - 1; l > 0; --l) {
      use(l, s, true);
      if (l > 1) comm_->gather_start(l - 1);
      write_gradient(l, s);
      comm_->reshard(l);
      comm_->reduce_start(l);
      if (l + 1 < count()) finish(l + 1, s);
    }
    use_root_again(s);
    write_gradient(0, s);
    comm_->reshard(0);
    comm_->reduce_start(0);
    finish(1, s);
    finish(0, s);
  }

  void update(int u, int s) {
    for (size_t p = 0; p < units_[u].pieces.size(); ++p)
      if (units_[u].pieces[p].count > 0)
        gpu().ops->cast(steps_[s][u].shard[p], comm_->shard(u, static_cast<int>(p)));
    comm_->publish(u);
  }

  void use(int u, int s, bool again) {
    full_[u] = static_cast<char*>(comm_->gather_wait(u));
    copy_out(u, again ? steps_[s][u].gathered_again : steps_[s][u].gathered);
  }

  void use_root_again(int s) { copy_out(0, steps_[s][0].gathered_again); }

  void copy_out(int u, const std::vector<Buffer>& to) const {
    const UnitSpec& spec = units_[u];
    for (size_t p = 0; p < spec.pieces.size(); ++p) {
      char* rows =
          full_[u] + spec.pieces[p].offset * static_cast<int64_t>(dtype_size(spec.param_dtype));
      if (to[p]->numel() > 0) gpu().ops->cast(Tensor(rows, spec.param_dtype, to[p]->shape), to[p]);
    }
  }

  void write_gradient(int u, int s) {
    float* gradient = comm_->grad_buffer(u);
    for (size_t p = 0; p < units_[u].pieces.size(); ++p) {
      const Buffer& from = steps_[s][u].gradient[p];
      if (from->numel() > 0)
        gpu().ops->cast(from, Tensor::of(gradient + units_[u].pieces[p].offset, from->shape));
    }
  }

  void finish(int u, int s) {
    const std::vector<Buffer>& reduced = steps_[s][u].reduced;
    const std::vector<Tensor> dst(reduced.begin(), reduced.end());
    comm_->reduce_wait(u, dst, 0.5f, false);
  }

  std::string wrong_gather(int u, size_t p, int s, const std::vector<float>& values) const {
    const int64_t count = units_[u].pieces[p].count;
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
      const float expected = param_value(u, i % count, static_cast<int>(i / count), s);
      if (values[i] != expected)
        return fmt::format("step {} {} piece {}: gathered element {} is {}, expected {}\n", s,
                           units_[u].name, p, i, values[i], expected);
    }
    return "";
  }

  std::string wrong_reduction(int u, size_t p, int s, const std::vector<float>& values) const {
    const int64_t count = units_[u].pieces[p].count;
    for (int64_t i = 0; i < count; ++i) {
      float expected = 0;
      for (int r = 0; r < test_world().size(); ++r)
        expected += 0.5f * grad_value(u, test_world().rank() * count + i, r, s);
      if (values[i] != expected)
        return fmt::format("step {} {} piece {}: reduced element {} is {}, expected {}\n", s,
                           units_[u].name, p, i, values[i], expected);
    }
    return "";
  }

  std::unique_ptr<Collectives> comm_;
  std::vector<UnitSpec> units_;
  std::vector<Step> steps_[kSteps];  // [step][unit]
  char* full_[4] = {};
};

class GpuTransport : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, GpuTransport, testing::Values("nccl", "mpi_cuda"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(GpuTransport, OrdersWhatItMoves) {
  const TransportOptions options(std::string(GetParam()) == "nccl" ? "nccl" : "mpi-cuda");
  for (DType reduce_dtype : {DType::f32, DType::bf16, DType::fp16}) {
    const DType param_dtype = reduce_dtype == DType::fp16 ? DType::fp16 : DType::bf16;
    Steps steps(options, param_dtype, reduce_dtype);
    steps.run();
    EXPECT_EQ(steps.wrong(), "");
  }
}

}  // namespace
}  // namespace qshard
