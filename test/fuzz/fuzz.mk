# make fuzz SECONDS=30: libFuzzer (clang with its runtime) on every reader of test/fuzz/targets.h.
#
# SECONDS are shared by the targets. New inputs stay in $(BUILD)/fuzz/corpus; one that breaks a
# target is written to $(BUILD)/fuzz/NAME-crash-… (or -oom-, -timeout-): fix the fault and add the
# file to test/fuzz/seeds/NAME, which test/unit/fuzz_seeds_test.cpp replays.
FUZZ_CXX     ?= clang++
SECONDS      ?= 30
FUZZ_TARGETS := safetensors index config tokens checkpoint
FUZZ_DIR     := $(BUILD)/fuzz
FUZZ_SRC     := $(wildcard src/base/*.cpp src/tensor/*.cpp src/device/*.cpp src/io/*.cpp) \
                src/comm/world.cpp src/comm/placement.cpp src/fsdp/shard_layout.cpp src/model/qwen3_config.cpp \
                src/model/qwen3_params.cpp \
                src/train/ckpt_tools.cpp test/fuzz/targets.cpp test/fuzz/hdf5_edits.cpp
FUZZ_OBJ     := $(FUZZ_SRC:%.cpp=$(FUZZ_DIR)/obj/%.o)
FUZZ_FLAGS   := -std=c++20 -g -O1 -fsanitize=fuzzer-no-link,address,undefined \
                -fno-sanitize-recover=undefined -Iinclude -Wno-unknown-pragmas \
                $(MPI_CFLAGS) $(call as_system,$(HDF5_CFLAGS)) $(CPPFLAGS)
FUZZ_RUN     := ASAN_OPTIONS=detect_leaks=0 OMPI_ALLOW_RUN_AS_ROOT=1
# 1 where the compiler has libFuzzer; asked only by those who use it.
HAS_LIBFUZZER = $(shell echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' | \
                  $(FUZZ_CXX) -x c++ -fsanitize=fuzzer -o /dev/null - 2>/dev/null && echo 1)
fuzz_mpicxx   = OMPI_CXX="$(FUZZ_CXX)" MPICH_CXX="$(FUZZ_CXX)" $(MPICXX)

$(FUZZ_DIR)/obj/%.o: %.cpp
	@mkdir -p $(@D)
	@echo "  CXX  $< ($(FUZZ_CXX))"
	$(Q)$(fuzz_mpicxx) $(FUZZ_FLAGS) -MMD -MP -c $< -o $@

$(FUZZ_TARGETS:%=$(FUZZ_DIR)/%): $(FUZZ_DIR)/%: test/fuzz/fuzz_main.cpp $(FUZZ_OBJ)
	@echo "  LD   $@"
	$(Q)$(fuzz_mpicxx) $(FUZZ_FLAGS) -fsanitize=fuzzer -DFUZZ_TARGET=$* $^ -o $@ $(LIBS)

fuzz-programs: $(FUZZ_TARGETS:%=$(FUZZ_DIR)/%)

fuzz: fuzz-programs  ## SECONDS=30 of libFuzzer on the readers of files (clang)
	@set -e; for t in $(FUZZ_TARGETS); do mkdir -p $(FUZZ_DIR)/corpus/$$t; \
	  echo "  FUZZ $$t"; \
	  $(FUZZ_RUN) $(FUZZ_DIR)/$$t $(FUZZ_DIR)/corpus/$$t test/fuzz/seeds/$$t \
	    -max_total_time=$$(($(SECONDS) / $(words $(FUZZ_TARGETS)))) -timeout=10 -rss_limit_mb=1024 \
	    -malloc_limit_mb=128 -max_len=8192 -artifact_prefix=$(FUZZ_DIR)/$$t- -print_final_stats=1 \
	    >$(FUZZ_DIR)/$$t.log 2>&1 || { tail -n 60 $(FUZZ_DIR)/$$t.log; exit 1; }; \
	  sed -n 's/^stat::number_of_executed_units: */       inputs /p' $(FUZZ_DIR)/$$t.log; done

# The replay of the seeds, with the compiler of all other tests.
FUZZ_REPLAY  := $(call objects,test/fuzz/targets.cpp test/fuzz/hdf5_edits.cpp)
$(BUILD)/test/unit/fuzz_seeds_test: $(FUZZ_REPLAY)

.PHONY: fuzz fuzz-programs
-include $(FUZZ_OBJ:.o=.d) $(FUZZ_REPLAY:.o=.d)
