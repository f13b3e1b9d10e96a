# The CUDA sources on the simulator (test/cudasim). The Makefile includes this file after its own
# rules; the simulator's own tests need no other file:
#   make -f test/cudasim/cudasim.mk cudasim-self-test SIM=tracker
#
#   SIM=plain         build of the simulator: plain, tracker (finds races) or san (ASan + UBSan)
#
# From the Makefile: BUILD, MPICXX, FLAGS, LIBS, LIB_SRC. Everything is built in $(CUDASIM_BUILD).
SIM           ?= plain
CUDA_HOME     ?= /usr/local/cuda
MPICXX        ?= mpicxx
CUDASIM_BUILD ?= $(or $(BUILD),build)/cudasim$(addprefix -,$(filter-out plain,$(SIM)))
CUDASIM_Q     := $(if $(V),,@)

CUDASIM_DIR   := test/cudasim
CUDASIM_SAN   := $(if $(filter san,$(SIM)),-fsanitize=address -fsanitize=undefined \
                 -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
# -fno-extern-tls-init: an extern thread_local array has no initialiser to call.
CUDASIM_FLAGS := -std=c++20 -g $(if $(filter san,$(SIM)),-O1,-O2) $(CUDASIM_SAN) \
                 -fno-extern-tls-init -fno-math-errno \
                 -Wall -Wextra -Wpedantic -Wshadow $(if $(WERROR),-Werror) \
                 -I$(CUDASIM_DIR)/include -I$(CUDASIM_DIR)/src -I. -Iinclude \
                 -isystem $(CUDA_HOME)/include -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX
# Of the sources whose accesses the tracker sees: kernels.
CUDASIM_CU    := -x c++ -Wno-unknown-pragmas $(if $(filter tracker,$(SIM)),-fsanitize=thread \
                 --param tsan-instrument-func-entry-exit=0)
CUDASIM_LIBS  := $(CUDASIM_SAN) -rdynamic -ldl

cudasim_obj    = $(patsubst %,$(CUDASIM_BUILD)/obj/%.o,$(1))
# Link order matters: see src/shared_region.h.
CUDASIM_BEGIN := $(call cudasim_obj,$(CUDASIM_DIR)/src/shared_begin.cpp)
CUDASIM_END   := $(call cudasim_obj,$(CUDASIM_DIR)/src/shared_end.cpp)
CUDASIM_SRC   := $(filter-out %/shared_begin.cpp %/shared_end.cpp %/tracker_hooks.cpp, \
                 $(wildcard $(CUDASIM_DIR)/src/*.cpp)) \
                 $(if $(filter tracker,$(SIM)),$(CUDASIM_DIR)/src/tracker_hooks.cpp)
CUDASIM_OBJ   := $(call cudasim_obj,$(CUDASIM_SRC))
CUDASIM_TESTS := $(patsubst %.cpp,$(CUDASIM_BUILD)/%,$(wildcard $(CUDASIM_DIR)/tests/*_test.cpp))

# The program and its CUDA tests: the same host sources, with the simulator's headers first.
CUDASIM_KERNELS := $(call cudasim_obj,$(wildcard cuda/*.cu))
CUDASIM_DEVICE  := $(CUDASIM_BEGIN) $(CUDASIM_KERNELS) $(CUDASIM_END) $(CUDASIM_OBJ)
CUDASIM_HOST    := $(FLAGS) $(CUDASIM_SAN) -I$(CUDASIM_DIR)/include -I. \
                   -isystem $(CUDA_HOME)/include -DHAVE_CUDA=1
cudasim_host     = $(patsubst %.cpp,$(CUDASIM_BUILD)/host/%.o,$(1))
CUDASIM_LIB     := $(CUDASIM_BUILD)/libqshard.a
CUDASIM_LIB_OBJ := $(call cudasim_host,$(LIB_SRC) $(wildcard cuda/*.cpp))
CUDASIM_PROGRAMS := $(CUDASIM_BUILD)/qshard \
                    $(patsubst %.cpp,$(CUDASIM_BUILD)/%,$(wildcard test/cuda/*_test.cpp))

cudasim: $(CUDASIM_PROGRAMS)  ## the CUDA backend on the simulator, in build/cudasim (SIM=...)

cudasim-test: $(CUDASIM_PROGRAMS) $(CUDASIM_TESTS)  ## tests of the simulator and of the CUDA backend on it
	@test/run.py --build $(BUILD) --cudasim $(CUDASIM_BUILD) -k cudasim $(ARGS)

cudasim-verify: cudasim  ## all reference cases, dtypes and GPU transports on 1 to 4 ranks, 20 seeds: hours (ARGS="--seeds 2")
	@QSHARD_BUILD=$(BUILD) QSHARD_CUDASIM=$(CUDASIM_BUILD) test/cuda/verify_matrix.py $(ARGS)

cudasim-faults:  ## faults planted in the GPU transports, 20 seeds: an hour (ARGS="--seeds 2")
	@$(MAKE) SIM=tracker cudasim
	@QSHARD_BUILD=$(BUILD) test/cuda/transport_faults.py $(ARGS)

cudasim-self-test: $(CUDASIM_TESTS)
	$(CUDASIM_Q)set -e; for t in $(CUDASIM_TESTS); do $$t; done

$(CUDASIM_BUILD)/obj/%.cpp.o: %.cpp
	@mkdir -p $(@D)
	@echo "  CXX  $<"
	$(CUDASIM_Q)$(MPICXX) $(CUDASIM_FLAGS) -MMD -MP -c $< -o $@

$(CUDASIM_BUILD)/obj/%.cu.o: %.cu
	@mkdir -p $(@D)
	@echo "  SIM  $<"
	$(CUDASIM_Q)$(MPICXX) $(CUDASIM_FLAGS) $(CUDASIM_CU) -MMD -MP -c $< -o $@

$(CUDASIM_BUILD)/$(CUDASIM_DIR)/tests/%_test: \
    $(CUDASIM_BEGIN) $(CUDASIM_BUILD)/obj/$(CUDASIM_DIR)/tests/device_kernels.cu.o $(CUDASIM_END) \
    $(CUDASIM_BUILD)/obj/$(CUDASIM_DIR)/tests/%_test.cpp.o \
    $(CUDASIM_BUILD)/obj/$(CUDASIM_DIR)/tests/harness.cpp.o $(CUDASIM_OBJ)
	@mkdir -p $(@D)
	@echo "  LD   $@"
	$(CUDASIM_Q)$(MPICXX) $^ -o $@ $(CUDASIM_LIBS)

$(CUDASIM_BUILD)/host/%.o: %.cpp
	@mkdir -p $(@D)
	@echo "  CXX  $<"
	$(CUDASIM_Q)$(MPICXX) $(CUDASIM_HOST) -MMD -MP -c $< -o $@

$(CUDASIM_LIB): $(CUDASIM_LIB_OBJ)
	@rm -f $@
	$(CUDASIM_Q)ar rcs $@ $^

$(CUDASIM_BUILD)/qshard: $(CUDASIM_DEVICE) $(call cudasim_host,src/main.cpp) $(CUDASIM_LIB)
	@echo "  LD   $@"
	$(CUDASIM_Q)$(MPICXX) $(CUDASIM_HOST) $^ -o $@ $(LIBS) $(CUDASIM_LIBS)

$(CUDASIM_BUILD)/test/cuda/%_test: $(CUDASIM_DEVICE) \
    $(call cudasim_host,test/cuda/%_test.cpp test/test_main.cpp) $(CUDASIM_LIB)
	@mkdir -p $(@D)
	@echo "  LD   $@"
	$(CUDASIM_Q)$(MPICXX) $(CUDASIM_HOST) $^ -o $@ -lgtest $(LIBS) $(CUDASIM_LIBS)

ifneq ($(filter cudasim%,$(MAKECMDGOALS)),)
$(if $(wildcard $(CUDA_HOME)/include/cuda_bf16.h),,$(error cuda_bf16.h not found: the simulator \
  takes NVIDIA's number types from the toolkit; name its folder with CUDA_HOME))
endif

.PHONY: cudasim cudasim-test cudasim-verify cudasim-faults cudasim-self-test
.SECONDARY:
-include $(shell find $(CUDASIM_BUILD) -name '*.d' 2>/dev/null)
