// What the user may say about the transport.
#pragma once

#include <string>
#include <utility>

namespace qshard {

struct TransportOptions {
  std::string name;                    // auto, shm, mpi, nccl or mpi-cuda
  std::string nccl_buffers = "plain";  // plain, windows or copy-engine: see cuda/nccl_collectives.h
  std::string mpi_memory = "auto";     // auto, device or pinned: see cuda/mpi_cuda_collectives.h

  TransportOptions(std::string transport = "auto") : name(std::move(transport)) {}
  TransportOptions(const char* transport) : name(transport) {}
};

}  // namespace qshard
