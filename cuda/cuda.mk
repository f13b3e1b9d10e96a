# The CUDA backend. The Makefile includes this file where CUDA=1 is set, after its own rules.
#
## CUDA=1            the CUDA backend too, in build/cuda (one binary has both)
##   CUDA_HOME=/usr/local/cuda     the toolkit
##   CUDA_ARCHS="80 90 100"        GPUs to compile for; the last also as PTX, for those after it
#
# What the Makefile takes from here: CUDA_OBJ belongs into the library, CUDA_CFLAGS to the flags of host
# code and CUDA_LIBS to the link line; BUILD defaults to build/cuda.
CUDA_HOME  ?= /usr/local/cuda
CUDA_ARCHS ?= 80 90 100
NVCC       ?= $(CUDA_HOME)/bin/nvcc

CUDA_CFLAGS := -I. -isystem $(CUDA_HOME)/include -DHAVE_CUDA=1
CUDA_LIBDIR := $(firstword $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/targets/x86_64-linux/lib))
CUDA_LIBS   := -L$(CUDA_LIBDIR) -Wl,-rpath,$(CUDA_LIBDIR) -lcublasLt -lcudart
CUDA_SRC    := $(wildcard cuda/*.cpp)
CUDA_KERNELS := $(wildcard cuda/*.cu)
CUDA_OBJ    := $(patsubst %.cpp,$(BUILD)/obj/%.o,$(CUDA_SRC)) \
               $(patsubst %.cu,$(BUILD)/obj/%.cu.o,$(CUDA_KERNELS))

# No fmt and no MPI in .cu files, so they need none of the host's flags.
CUDA_CODE  := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
              -gencode arch=compute_$(lastword $(CUDA_ARCHS)),code=compute_$(lastword $(CUDA_ARCHS))
NVCC_FLAGS := -std=c++20 -O3 -lineinfo -I. $(CUDA_CODE) -Xcompiler -Wall,-Wextra \
              $(if $(WERROR),-Werror all-warnings) $(NVCCFLAGS)

# A change of the flags builds anew, as `commands` of the Makefile does for host code.
$(BUILD)/cuda-commands: FORCE
	@mkdir -p $(@D)
	@echo '$(NVCC) $(NVCC_FLAGS)' >$@.new; if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(BUILD)/obj/%.cu.o: %.cu $(BUILD)/cuda-commands
	@mkdir -p $(@D)
	@echo "  NVCC $<"
	$(Q)$(NVCC) $(NVCC_FLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

kernel-report:  ## registers, spills and instructions of the kernels, into cuda/registers.md
	@NVCC='$(NVCC)' scripts/kernel_report.sh

-include $(CUDA_OBJ:.o=.d)
.PHONY: kernel-report
