// Replays a reference case and compares with the truth; see the README of the reference format.

#include "train/verify.h"
#include "backends.h"
#include "base/config.h"
#include "cli/cli.h"

namespace qshard {
namespace {

constexpr const char* kFooter =
    R"(A reference folder holds config.json, train.json, model.safetensors, batches.safetensors,
step1_grads.safetensors and final.safetensors (see test/reference/README.md). Exit code 0 when every
error is within its limit, 1 otherwise.

Examples:
  mpirun -n 4 qshard verify --reference test/reference/tiny-tied
  mpirun -n 2 qshard verify --reference test/reference/tiny-tied --ranks-any --param-dtype bf16
  mpirun -n 4 qshard verify --reference test/reference/tiny-tied --mesh 2x2)";

int run_verify(VerifyOptions& options, const std::string& backend_name, World& world) {
  collectively(world,
               [&] { options.transport = choose_transport(options.transport, backend_name); });
  Backend backend = make_backend(backend_name, world);
  const VerifyReport report = verify_reference(options, world, backend);
  if (world.rank() != 0) return report.ok ? kExitDone : kExitFailed;
  fmt::print("transport {}\n", report.transport);
  if (report.loss_scale > 0) fmt::print("loss scale {}\n", report.loss_scale);
  fmt::print("{:<14} {:>10} {:>10} {:>10}  {}\n", "quantity", "error", "PyTorch's", "limit", "ok");
  for (const VerifyRow& row : report.rows)
    fmt::print("{:<14} {:>10.2e} {:>10.2e} {:>10.2e}  {}\n", row.quantity, row.error, row.pytorch,
               row.limit, row.ok() ? "yes" : "NO " + row.where);
  std::string failed;
  for (const VerifyRow& row : report.rows)
    if (!row.ok()) failed += (failed.empty() ? "" : ", ") + row.quantity;
  fmt::print("verify: {}\n", report.ok ? "ok" : "FAILED " + failed);
  return report.ok ? kExitDone : kExitFailed;
}

}  // namespace

void add_verify(CLI::App& app, Command& run) {
  auto options = std::make_shared<VerifyOptions>();
  auto backend = std::make_shared<std::string>("cpu");
  CLI::App* sub =
      app.add_subcommand("verify", "replay a reference case of PyTorch FSDP2 and compare");
  sub->footer(kFooter);
  sub->add_option("--reference", options->folder, "folder of the case")->required();
  const CLI::IsMember dtypes({"f32", "bf16", "fp16"});
  const CLI::IsMember transports({"auto", "shm", "mpi", "nccl", "mpi-cuda"}),
      backends({"cpu", "cuda"});
  const CLI::IsMember nccl_buffers({"plain", "windows", "copy-engine"}),
      mpi_memory({"auto", "device", "pinned"});
  sub->add_option("--param-dtype", options->param_dtype, "f32, bf16 or fp16")
      ->check(dtypes)
      ->capture_default_str();
  sub->add_option("--reduce-dtype", options->reduce_dtype, "f32, bf16 or fp16")
      ->check(dtypes)
      ->capture_default_str();
  sub->add_option("--transport", options->transport.name,
                  "shm or mpi on the CPU, nccl or mpi-cuda on GPUs; auto: shm or nccl")
      ->check(transports)
      ->capture_default_str();
  sub->add_option("--nccl-buffers", options->transport.nccl_buffers,
                  "comm.nccl_buffers of `qshard train`")
      ->check(nccl_buffers)
      ->capture_default_str();
  sub->add_option("--mpi-memory", options->transport.mpi_memory,
                  "comm.mpi_memory of `qshard train`")
      ->check(mpi_memory)
      ->capture_default_str();
  sub->add_option("--backend", *backend, "cpu, or cuda in a build by `make CUDA=1`")
      ->check(backends)
      ->capture_default_str();
  sub->add_option("--out", options->out,
                  "folder for step1_grads.safetensors, final.safetensors, result.json");
  sub->add_flag("--ranks-any", options->ranks_any,
                "accept another number of ranks than the case's, where its batch divides");
  FsdpOptions& fsdp = options->fsdp;
  sub->add_option("--mesh", fsdp.mesh, "full, auto or RxS, as fsdp.mesh of `qshard train`")
      ->capture_default_str();
  sub->add_option("--reshard-after-forward", fsdp.reshard_after_forward, "true or false")
      ->capture_default_str();
  sub->add_option("--reshard-ranks", fsdp.reshard_ranks, "fsdp.reshard_ranks of `qshard train`")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  sub->add_option("--reshard-after-backward", fsdp.reshard_after_backward, "true or false")
      ->capture_default_str();
  sub->add_option("--layers-per-unit", fsdp.layers_per_unit,
                  "fsdp.layers_per_unit of `qshard train`")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--prefetch", fsdp.prefetch, "units gathered ahead")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  sub->add_option("--activation-checkpoint", options->activation_checkpoint,
                  "train.activation_checkpoint of `qshard train`")
      ->check(CLI::IsMember({"none", "selective", "full"}))
      ->capture_default_str();
  sub->add_option("--forward-prefetch", fsdp.forward_prefetch,
                  "the same in forward alone; -1: as --prefetch")
      ->check(CLI::Range(-1, 64))
      ->capture_default_str();
  sub->add_option("--backward-prefetch", fsdp.backward_prefetch,
                  "the same in backward alone; -1: as --prefetch")
      ->check(CLI::Range(-1, 64))
      ->capture_default_str();
  sub->add_option("--reduce-every-microbatch", fsdp.reduce_every_microbatch, "true or false")
      ->capture_default_str();
  sub->callback([options, backend, &run] {
    run = [options, backend](World& world) { return run_verify(*options, *backend, world); };
  });
}

}  // namespace qshard
