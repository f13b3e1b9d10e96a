# qshard: make run · make test · make help
MPICXX   ?= mpicxx
ARCH     ?= native
SAN      ?=
VARIANT  := $(if $(SAN),san,cpu)
BUILD    ?= build$(if $(SAN),/san,)
BIN      := $(BUILD)/qshard
Q        := $(if $(V),,@)

HDF5_CFLAGS := $(shell pkg-config --cflags hdf5-openmpi 2>/dev/null || pkg-config --cflags hdf5-mpi 2>/dev/null)
HDF5_LIBS   := $(shell pkg-config --libs hdf5-openmpi 2>/dev/null || pkg-config --libs hdf5-mpi 2>/dev/null)

WARN     := -Wall -Wextra -Wpedantic -Wshadow -Wno-unknown-pragmas
CXXFLAGS := -std=c++20 -g -march=$(ARCH) -fopenmp -fno-math-errno -fno-trapping-math $(WARN) \
            $(if $(SAN),-O1 -fsanitize=address -fsanitize=undefined -fno-omit-frame-pointer -fno-sanitize-recover=undefined,-O3)
CPPFLAGS := -Iinclude $(HDF5_CFLAGS) -MMD -MP
LDLIBS   := -ldnnl $(HDF5_LIBS) -lfmt -lxxhash

LIB_SRC  := $(filter-out src/main.cpp,$(wildcard src/*.cpp src/*/*.cpp))
LIB_OBJ  := $(LIB_SRC:%.cpp=$(BUILD)/obj/%.o)
LIB      := $(BUILD)/libqshard.a

all: $(BIN)

$(BUILD)/obj/%.o: %.cpp
	@mkdir -p $(@D)
	@echo "  CXX  $<"
	$(Q)$(MPICXX) $(CPPFLAGS) $(CXXFLAGS) -c $< -o $@

$(LIB): $(LIB_OBJ)
	@rm -f $@
	$(Q)ar rcs $@ $^

$(BIN): $(BUILD)/obj/src/main.o $(LIB)
	@echo "  LD   $@"
	$(Q)$(MPICXX) $(CXXFLAGS) $^ -o $@ $(LDLIBS)

# Each test/unit/x_test.cpp and test/mpi/x_test.cpp is a program of its own: $(BUILD)/test/unit/x_test
$(BUILD)/test/%: $(BUILD)/obj/test/%.o $(BUILD)/obj/test/test_main.o $(LIB)
	@mkdir -p $(@D)
	$(Q)$(MPICXX) $(CXXFLAGS) $^ -o $@ -lgtest $(LDLIBS)

clean:
	rm -rf $(BUILD)

.PHONY: all clean
.SECONDARY:
-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
