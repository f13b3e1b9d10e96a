// Which GPU a rank uses.
#pragma once

namespace qshard::cuda {

// The number among the visible devices of the rank `local_rank` of `local_size` on its node. One
// visible device is that rank's own (Slurm's --gpus-per-task shows each task its GPU as number 0;
// that no two ranks got the same one is checked later over MPI, by PCI id). Otherwise ranks take
// the devices in order; too few are an error that names the likely Slurm option.
int choose_device(int local_rank, int local_size, int visible);

}  // namespace qshard::cuda
