# The CUDA backend: the Makefile includes this file after its own rules where CUDA=1 is set. Adds
# cuda/* to the library and CUDA's and NCCL's flags to those of host code.
#
#   CUDA_HOME=/usr/local/cuda     the toolkit
#   NCCL_HOME=                    NCCL's include/ and lib/, where it is not in CUDA_HOME or the
#                                 system's folders
#   CUDA_ARCHS="80 90 100"        GPUs to compile for; the last also as PTX, for those after it
CUDA_HOME  ?= /usr/local/cuda
CUDA_ARCHS ?= 80 90 100
NVCC       ?= $(CUDA_HOME)/bin/nvcc

CUDA_LIBDIR := $(firstword $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/targets/x86_64-linux/lib))
NCCL_LIBDIR := $(firstword $(wildcard $(NCCL_HOME:%=%/lib64) $(NCCL_HOME:%=%/lib)))
FLAGS       += -I. $(NCCL_HOME:%=-isystem %/include) -isystem $(CUDA_HOME)/include -DHAVE_CUDA=1
LIBS        += $(foreach d,$(CUDA_LIBDIR) $(NCCL_LIBDIR),-L$(d) -Wl,-rpath,$(d)) \
               -lnccl -lcublasLt -lcudart
CUDA_SRC    := $(wildcard cuda/*.cpp)
CUDA_KERNELS := $(wildcard cuda/*.cu)
CUDA_OBJ    := $(patsubst %.cpp,$(BUILD)/obj/%.o,$(CUDA_SRC)) \
               $(patsubst %.cu,$(BUILD)/obj/%.cu.o,$(CUDA_KERNELS))

$(LIB): $(CUDA_OBJ)
sources     += $(CUDA_SRC) $(CUDA_KERNELS)

# No fmt and no MPI in .cu files, so they need none of the host's flags.
CUDA_CODE  := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
              -gencode arch=compute_$(lastword $(CUDA_ARCHS)),code=compute_$(lastword $(CUDA_ARCHS))
KERNEL_FLAGS := -std=c++20 -O3 -I. -Iinclude
NVCC_FLAGS := $(KERNEL_FLAGS) -lineinfo $(CUDA_CODE) -Xcompiler -Wall,-Wextra \
              $(if $(WERROR),-Werror all-warnings) $(NVCCFLAGS)

# A change of the flags builds anew, as `commands` of the Makefile does for host code.
$(BUILD)/cuda-commands: FORCE
	@mkdir -p $(@D)
	@echo '$(NVCC) $(NVCC_FLAGS)' >$@.new; if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(BUILD)/obj/%.cu.o: %.cu $(BUILD)/cuda-commands
	@mkdir -p $(@D)
	@echo "  NVCC $<"
	$(Q)$(NVCC) $(NVCC_FLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

ifneq ($(filter-out deps info help clean print-%,$(GOALS)),)
$(if $(wildcard $(NVCC)),,$(error $(NVCC) not found: name the CUDA toolkit with CUDA_HOME))
$(if $(filter found,$(shell echo $(call macro,nccl.h,found))),,$(error nccl.h not found: name the folder of \
  NCCL's include/ and lib/ with NCCL_HOME))
endif

kernel-report:  ## registers, spills and instructions of the kernels, into cuda/registers.md
	+@NVCC='$(NVCC)' scripts/kernel_report.sh

# For any CPU of the last ten years, since it runs on other machines: a build of its own.
BUNDLE_ARCH ?= x86-64-v3
BUNDLE      ?= $(BUILD)/gpu-check
# engine_test counts the host's waits, which only the simulator can.
CUDA_TESTS  := $(patsubst %.cpp,$(BUILD)/%,$(filter-out %/engine_test.cpp, \
                 $(wildcard test/cuda/*_test.cpp)))

gpu-check-bundle:  ## folder with all that scripts/gpu_check.sh needs on a machine with GPUs (BUNDLE=)
	@$(MAKE) ARCH=$(BUNDLE_ARCH) BUILD=$(BUILD)/portable cuda-programs
	@LD_LIBRARY_PATH=$(CUDA_LIBDIR):$(NCCL_LIBDIR):$$LD_LIBRARY_PATH \
	  scripts/gpu_check_bundle.sh $(BUILD)/portable $(BUNDLE)

cuda-programs: $(BIN) $(CUDA_TESTS)

-include $(CUDA_OBJ:.o=.d)
.PHONY: kernel-report gpu-check-bundle cuda-programs
