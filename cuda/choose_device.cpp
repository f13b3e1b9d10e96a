#include "cuda/choose_device.h"

#include "base/check.h"

namespace qshard::cuda {

int choose_device(int local_rank, int local_size, int visible) {
  QS_CHECK(0 <= local_rank && local_rank < local_size, "local rank {} of {}", local_rank,
           local_size);
  if (visible == 0)
    fail(
        "local rank {} of {} sees no GPU: ask Slurm for them with --gpus-per-node={}, and check "
        "CUDA_VISIBLE_DEVICES and nvidia-smi on the node; --backend cpu runs without",
        local_rank, local_size, local_size);
  if (visible == 1) return 0;
  if (visible < local_size)
    fail(
        "local rank {} of {} sees only {} GPUs: a rank needs one of its own. Ask Slurm for "
        "--gpus-per-node={}, or start {} ranks a node with --ntasks-per-node={}",
        local_rank, local_size, visible, local_size, visible, visible);
  return local_rank;
}

}  // namespace qshard::cuda
