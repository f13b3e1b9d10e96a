# qshard: make run · make test · make help
#
## Variables
##   V=1               show the commands
##   ARCH=native       CPU to compile for (gcc's -march)
##   CUDA=1            the CUDA backend as well, in build/cuda; CUDA_HOME=, CUDA_ARCHS="80 90 100"
##   SIM=plain         what `make cudasim` builds: plain, tracker (finds races), san
##   SAN=1             address and undefined-behaviour sanitizers, in build/san
##   WERROR=1          warnings are errors
##   BUILD=build       where everything that is built goes
##   MPICXX=mpicxx     MPI compiler; OMPI_CXX or MPICH_CXX name the C++ compiler under it
##   CXXFLAGS= CPPFLAGS= LDFLAGS=   added to ours
##   HDF5_CFLAGS= HDF5_LIBS=        instead of what pkg-config says about parallel HDF5
##   RANKS=4           ranks of `make run` and `make bench`
##   ARGS=             options for `make run` (--train.steps 50), test (-k NAME) or bench
MPICXX   ?= mpicxx
ARCH     ?= native
RANKS    ?= 4
BUILD    ?= build$(if $(filter 1,$(CUDA)),/cuda)$(if $(SAN),/san)
BIN      := $(BUILD)/qshard
Q        := $(if $(V),,@)
GOALS    := $(or $(MAKECMDGOALS),all)

# All cores unless a -j was given, on the command line or by a make above this one.
# (Make 4.3 does not yet know its own -j here.)
GIVEN_J   := $(shell { tr '\0' '\n' </proc/$$PPID/cmdline; \
                       printf '%s\n' $$MAKEFLAGS -$$MAKEFLAGS; } 2>/dev/null | \
               grep -E '^(-[a-zA-Z]*j|--jobs|--jobserver)')
MAKEFLAGS += $(if $(GIVEN_J),,-j$(shell nproc)) --no-print-directory
# Whole outputs of parallel compilations, but a running program's lines as they come.
MAKEFLAGS += $(if $(filter deps run test test-cluster bench cudasim-test,$(GOALS)),,--output-sync=target)

# Headers of MPI and HDF5 are system headers, so that ours alone are warned about.
as_system    = $(patsubst -I%,-isystem %,$(filter -I%,$(1))) $(filter-out -I%,$(1))
MPI_SHOW    := $(shell $(MPICXX) -show 2>/dev/null)
MPI_CFLAGS  := $(call as_system,$(filter -I%,$(MPI_SHOW))) -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX
HDF5_NAMES  := hdf5-$(if $(findstring mpich,$(MPI_SHOW)),mpich,openmpi) hdf5-mpi hdf5
HDF5_PC     := $(shell for name in $(HDF5_NAMES); do \
                         pkg-config --exists $$name && echo $$name && break; done 2>/dev/null)
HDF5_CFLAGS := $(or $(HDF5_CFLAGS),$(if $(HDF5_PC),$(shell pkg-config --cflags $(HDF5_PC))))
HDF5_LIBS   := $(or $(HDF5_LIBS),$(if $(HDF5_PC),$(shell pkg-config --libs $(HDF5_PC))))

# gcc 12 sees an overflow in fmt 9 where there is none.
WARN     := -Wall -Wextra -Wpedantic -Wshadow -Wno-unknown-pragmas -Wno-stringop-overflow \
            $(if $(WERROR),-Werror)
OPTIMIZE := $(if $(SAN),-O1 -fsanitize=address -fsanitize=undefined \
                           -fno-sanitize-recover=undefined -fno-omit-frame-pointer,-O3)
FLAGS    := -std=c++20 -g -march=$(ARCH) -fopenmp -fno-math-errno -fno-trapping-math \
            $(OPTIMIZE) $(WARN) -Iinclude $(MPI_CFLAGS) $(call as_system,$(HDF5_CFLAGS)) \
            $(CPPFLAGS) $(CXXFLAGS)
LIBS     := $(LDFLAGS) -ldnnl $(HDF5_LIBS) -lfmt -lxxhash

# What the preprocessor makes of a text after a header; empty without the header.
macro       = $$(echo '$(2)' | $(MPICXX) $(FLAGS) -include $(1) -E -P -x c++ - 2>/dev/null | \
                 tail -n 1 | tr -d '"')
HDF5_SERIAL = $(filter H5_HAVE_PARALLEL,$(shell echo $(call macro,H5pubconf.h,H5_HAVE_PARALLEL)))

objects    = $(patsubst %.cpp,$(BUILD)/obj/%.o,$(1))
LIB       := $(BUILD)/libqshard.a
LIB_SRC   := $(filter-out src/main.cpp,$(wildcard src/*.cpp src/*/*.cpp))
TEST_SRC  := $(wildcard test/unit/*_test.cpp test/mpi/*_test.cpp)
BENCH_SRC := $(wildcard test/bench/*_bench.cpp)
TESTS     := $(TEST_SRC:%.cpp=$(BUILD)/%)
BENCHES   := $(BENCH_SRC:%.cpp=$(BUILD)/%)
SAN_OBJ   := $(if $(SAN),$(call objects,test/sanitizer.cpp))
ALL_SRC   := $(LIB_SRC) src/main.cpp $(TEST_SRC) $(BENCH_SRC) test/test_main.cpp test/sanitizer.cpp

## Targets
all: $(BIN)  ## build/qshard (default)

deps:  ## install what is missing (Debian, Ubuntu), or say what that is
	@scripts/install_deps.sh

run: deps  ## install what is missing, build, train the demo on $(RANKS) CPU ranks
	@$(MAKE) all
	@QSHARD=$(BIN) RANKS=$(RANKS) scripts/run_demo.sh $(ARGS)

test:  ## build and run all tests; those of `make cudasim` too once it was built
	@$(MAKE) test-programs $(if $(wildcard $(CUDASIM_BUILD)/qshard),cudasim) \
	  $(if $(HAS_LIBFUZZER),fuzz-programs)
	@test/run.py --build $(BUILD) $(ARGS)

test-cluster: $(BIN)  ## jobs on a Slurm of two hosts that it starts here; exit code 77: it cannot
	@test/run.py --build $(BUILD) --cluster -k cluster/ $(ARGS)

bench:  ## build and run the benchmarks of test/bench
	@$(MAKE) $(BENCHES)
	@set -e; for b in $(BENCHES); do scripts/mpirun.sh -n $(RANKS) $$b $(ARGS); done

info:  ## compiler, libraries, CPU and flags that a build here uses
	@echo "compiler  $$($(MPICXX) --version | head -n 1)"
	@echo "MPI       $$($(or $(MPIRUN),mpirun) --version | head -n 1)"
	@echo "HDF5      $(call macro,hdf5.h,H5_VERS_INFO), $(if $(HDF5_SERIAL),serial!,parallel)"
	@set -- $(call macro,dnnl.h,DNNL_VERSION_MAJOR DNNL_VERSION_MINOR DNNL_VERSION_PATCH); \
	 echo "oneDNN    $$1.$$2.$$3"
	@echo "CPU       $$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $$(nproc) CPUs"
	@echo "compile   $(strip $(MPICXX) $(FLAGS))"
	@echo "link      $(strip $(LIBS))"

help:  ## this list
	@sed -nE 's/^## ?//p; s/^([a-z-]+):.*  ## (.*)/  make \1\t\2/p' Makefile test/fuzz/fuzz.mk \
	  cuda/cuda.mk test/cudasim/cudasim.mk | expand -t 22

clean:  ## remove $(BUILD)
	rm -rf $(BUILD)

test-programs: $(BIN) $(TESTS)

$(BUILD)/obj/%.o: %.cpp $(BUILD)/commands
	@mkdir -p $(@D)
	@echo "  CXX  $<"
	$(Q)$(MPICXX) $(FLAGS) -MMD -MP -c $< -o $@

$(LIB): $(call objects,$(LIB_SRC)) $(BUILD)/sources
	@rm -f $@
	$(Q)ar rcs $@ $(filter %.o,$^)

$(BIN): $(call objects,src/main.cpp) $(SAN_OBJ) $(LIB)
	@echo "  LD   $@"
	$(Q)$(MPICXX) $(FLAGS) $^ -o $@ $(LIBS)

# Each test/unit/x_test.cpp, test/mpi/x_test.cpp and test/bench/x_bench.cpp is a program of its own.
$(BUILD)/test/%_test: $(call objects,test/%_test.cpp test/test_main.cpp) $(SAN_OBJ) $(LIB)
	@mkdir -p $(@D)
	@echo "  LD   $@"
	$(Q)$(MPICXX) $(FLAGS) $(filter %.o,$^) $(LIB) -o $@ -lgtest $(LIBS)

$(BUILD)/test/%_bench: $(call objects,test/%_bench.cpp) $(LIB)
	@mkdir -p $(@D)
	@echo "  LD   $@"
	$(Q)$(MPICXX) $(FLAGS) $^ -o $@ -lbenchmark $(LIBS)

include test/fuzz/fuzz.mk
# With CUDA=1 the real thing; without, what runs the same sources on a CPU.
include $(if $(filter 1,$(CUDA)),cuda/cuda.mk,test/cudasim/cudasim.mk)

# What `qshard bench` records; only its object depends on it.
$(BUILD)/obj/src/base/build_info.o: private FLAGS += -DQSHARD_COMMIT='"$(commit)"'
$(BUILD)/obj/src/base/build_info.o: $(BUILD)/commit

# Files that change only with their text: every object depends on one, the library on the other.
# The macros of $(ARCH) tell when `native` is now another CPU, or the compiler a new one.
commands = $(MPICXX) $(FLAGS) $(LIBS) \
           $(shell $(MPICXX) -march=$(ARCH) -dM -E -x c++ /dev/null | cksum)
sources  = $(LIB_SRC)
commit  := $(shell git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null)
$(BUILD)/commands $(BUILD)/sources $(BUILD)/commit: FORCE
	@mkdir -p $(@D)
	@echo '$($(@F))' >$@.new; if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# One variable's value, for scripts: make -s print-FLAGS
print-%:
	@echo '$($*)'

FORCE:
.PHONY: all deps run test test-cluster test-programs bench info help clean FORCE
.SECONDARY:
-include $(patsubst %.o,%.d,$(call objects,$(ALL_SRC)))

# Said before the first of many errors about a missing header.
ifneq ($(filter-out deps run info help clean print-%,$(GOALS)),)
$(if $(MPI_SHOW),,$(error $(MPICXX) not found: `make deps` installs what is missing, or set MPICXX))
$(if $(HDF5_LIBS),,$(error pkg-config knows no parallel HDF5: `make deps` installs what is \
  missing, or set HDF5_CFLAGS and HDF5_LIBS))
$(if $(HDF5_SERIAL),$(error This HDF5 is serial: $(HDF5_CFLAGS). A parallel one is needed: \
  `make deps` installs what is missing, or set HDF5_CFLAGS and HDF5_LIBS))
endif
