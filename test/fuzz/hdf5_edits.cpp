#include "hdf5_edits.h"

#include <hdf5.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace qshard::fuzz {
namespace {

constexpr size_t kMaxEdits = 8;  // of one input, so that it stays fast

// Takes the bytes one after the other; zeros after the end.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  bool empty() const { return left_ == 0; }
  uint8_t next() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  uint64_t next64() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | next();
    return value;
  }
  std::string text(size_t n) {
    const size_t taken = std::min(n, left_);
    std::string value(reinterpret_cast<const char*>(data_), taken);
    data_ += taken;
    left_ -= taken;
    return value;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

struct Names {
  std::vector<std::string> attributes, datasets;
};

herr_t add_attribute(hid_t, const char* name, const H5A_info_t*, void* names) {
  static_cast<Names*>(names)->attributes.push_back(name);
  return 0;
}

herr_t add_dataset(hid_t, const char* name, const H5O_info_t* info, void* names) {
  if (info->type == H5O_TYPE_DATASET) static_cast<Names*>(names)->datasets.push_back(name);
  return 0;
}

Names names_of(hid_t file) {
  Names names;
  H5Aiterate2(file, H5_INDEX_NAME, H5_ITER_INC, nullptr, add_attribute, &names);
#if H5_VERSION_GE(1, 12, 0)
  H5Ovisit3(file, H5_INDEX_NAME, H5_ITER_INC, add_dataset, &names, H5O_INFO_BASIC);
#else
  H5Ovisit2(file, H5_INDEX_NAME, H5_ITER_INC, add_dataset, &names, H5O_INFO_BASIC);
#endif
  return names;
}

const std::string& pick(const std::vector<std::string>& names, Bytes& bytes) {
  static const std::string none = "new";
  return names.empty() ? none : names[bytes.next() % names.size()];
}

hid_t pick_type(Bytes& bytes) {
  const hid_t types[] = {H5T_NATIVE_FLOAT,  H5T_NATIVE_INT64, H5T_NATIVE_UINT64, H5T_NATIVE_INT8,
                         H5T_NATIVE_UINT32, H5T_IEEE_F64BE,   H5T_NATIVE_DOUBLE, H5T_C_S1};
  return types[bytes.next() % std::size(types)];
}

void write_number(hid_t file, const std::string& name, Bytes& bytes) {
  const hid_t type = pick_type(bytes);
  const uint64_t value = bytes.next64();
  const hsize_t n = 1 + bytes.next() % 2;
  const hid_t space = n == 1 ? H5Screate(H5S_SCALAR) : H5Screate_simple(1, &n, nullptr);
  const uint64_t values[2] = {value, value};
  H5Adelete(file, name.c_str());
  const hid_t attribute = H5Acreate2(file, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT);
  H5Awrite(attribute, type, values);
  H5Aclose(attribute);
  H5Sclose(space);
}

void write_text(hid_t file, const std::string& name, Bytes& bytes) {
  const bool variable = bytes.next() % 2 != 0;
  const size_t high = bytes.next();
  const std::string text = bytes.text(256 * (high % 16) + bytes.next());
  const hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
  H5Tset_size(type, variable ? H5T_VARIABLE : std::max<size_t>(1, text.size()));
  H5Adelete(file, name.c_str());
  const hid_t attribute = H5Acreate2(file, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT);
  const char* pointer = text.c_str();
  H5Awrite(attribute, type, variable ? static_cast<const void*>(&pointer) : pointer);
  H5Aclose(attribute);
  H5Sclose(space);
  H5Tclose(type);
}

void make_dataset(hid_t file, const std::string& name, Bytes& bytes) {
  const hid_t type = pick_type(bytes);
  const int layout = bytes.next() % 4, rank = bytes.next() % 6;
  std::vector<hsize_t> dims, chunk;
  for (int i = 0; i < rank; ++i) {
    const uint8_t kind = bytes.next();
    dims.push_back(kind < 250 ? kind % 8 : bytes.next64() >> (1 + 8 * (kind % 6)));
    chunk.push_back(2);
  }
  const hid_t space =
      rank == 0 ? H5Screate(H5S_SCALAR) : H5Screate_simple(rank, dims.data(), nullptr);
  const hid_t create = H5Pcreate(H5P_DATASET_CREATE);
  if (layout == 1 && rank > 0) H5Pset_chunk(create, rank, chunk.data());
  if (layout == 2) H5Pset_layout(create, H5D_COMPACT);
  if (layout == 3 && H5Sget_simple_extent_npoints(space) < 4096)
    H5Pset_alloc_time(create, H5D_ALLOC_TIME_EARLY);
  H5Ldelete(file, name.c_str(), H5P_DEFAULT);
  const hid_t dataset =
      H5Dcreate2(file, name.c_str(), type, space, H5P_DEFAULT, create, H5P_DEFAULT);
  if (dataset >= 0) H5Dclose(dataset);
  H5Pclose(create);
  H5Sclose(space);
}

}  // namespace

void edit_hdf5(const std::string& path, const uint8_t* data, size_t size) {
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
  const Names names = names_of(file);
  Bytes bytes(data, size);
  for (size_t i = 0; i < kMaxEdits && !bytes.empty(); ++i) {
    const int what = bytes.next() % 5;
    const std::string name = pick(what < 3 ? names.attributes : names.datasets, bytes);
    if (what == 0) H5Adelete(file, name.c_str());
    if (what == 1) write_number(file, name, bytes);
    if (what == 2) write_text(file, name, bytes);
    if (what == 3) H5Ldelete(file, name.c_str(), H5P_DEFAULT);
    if (what == 4) make_dataset(file, name, bytes);
  }
  H5Fclose(file);
}

}  // namespace qshard::fuzz
