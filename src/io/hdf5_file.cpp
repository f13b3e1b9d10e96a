#include "io/hdf5_file.h"

#include <hdf5.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace qshard {
namespace {

static_assert(H5_VERSION_GE(1, 10, 2), "HDF5 1.10.2 or newer is needed");
static_assert(sizeof(hid_t) == sizeof(int64_t));

constexpr size_t kMaxTextBytes = 64 << 20;  // of an attribute
constexpr unsigned kMaxCompact = 65535;     // attributes or names in one object header

// HDF5's error stack as one line: what the outermost call wanted, and the innermost reason.
std::string take_error_stack() {
  struct Ends {
    std::string outer, inner;
  } ends;
  const auto visit = [](unsigned, const H5E_error2_t* error, void* data) -> herr_t {
    auto& e = *static_cast<Ends*>(data);
    if (e.outer.empty()) e.outer = error->desc ? error->desc : "";
    e.inner = error->desc ? error->desc : "";
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, visit, &ends);
  H5Eclear2(H5E_DEFAULT);
  if (ends.outer.empty()) return "no reason given by HDF5";
  // Its drivers put the time, with a line's end, before errno's text.
  std::replace(ends.inner.begin(), ends.inner.end(), '\n', ' ');
  return ends.outer == ends.inner ? ends.outer : fmt::format("{}: {}", ends.outer, ends.inner);
}

[[noreturn]] void fail_hdf5(const std::string& file, const std::string& what) {
  const std::string reason = take_error_stack();
  const bool lock = reason.find("lock") != std::string::npos;
  fail("{}: cannot {}: {}{}", file, what, reason,
       lock ? " (the file system may lack file locks: set HDF5_USE_FILE_LOCKING=FALSE)" : "");
}

// Identifiers, sizes and status codes are all negative on failure.
template <typename R>
R check(R result, const std::string& file, const std::string& what) {
  if (result < 0) fail_hdf5(file, what);
  return result;
}

// Owns an identifier of any kind but a file's.
class Handle {
 public:
  Handle(hid_t id, const std::string& file, const std::string& what) : id_(check(id, file, what)) {}
  ~Handle() {
    if (id_ >= 0) H5Idec_ref(id_);
  }
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, H5I_INVALID_HID)) {}
  Handle& operator=(Handle&&) = delete;
  operator hid_t() const { return id_; }

 private:
  hid_t id_;
};

// HDF5 wants to close what is still open when the process ends, from atexit or, if it was first
// used after MPI_Init, from MPI_Finalize; version 1.10 crashes there when closing a file has
// failed, as on a full disk. Started here, before main, it does neither: every handle is closed by
// its owner.
const bool kStarted = H5dont_atexit() >= 0 && H5open() >= 0;

// HDF5 prints its error stack unless told not to; the setting belongs to a thread.
void silence_hdf5() {
  QS_CHECK(kStarted, "the HDF5 library cannot be started");
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

void disable_locking(hid_t access, const std::string& path) {
#if H5_VERSION_GE(1, 12, 1) || (H5_VERSION_GE(1, 10, 7) && !H5_VERSION_GE(1, 11, 0))
  check(H5Pset_file_locking(access, false, true), path, "set the file locking property");
#else
  (void)access, (void)path;
#endif
}

struct TypeName {
  Hdf5Type type;
  const char* name;
};
constexpr TypeName kTypes[] = {{Hdf5Type::f32, "f32"}, {Hdf5Type::f64, "f64"},
                               {Hdf5Type::u16, "u16"}, {Hdf5Type::u32, "u32"},
                               {Hdf5Type::u64, "u64"}, {Hdf5Type::i64, "i64"}};

hid_t native_type(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::f32:
      return H5T_NATIVE_FLOAT;
    case Hdf5Type::f64:
      return H5T_NATIVE_DOUBLE;
    case Hdf5Type::u16:
      return H5T_NATIVE_UINT16;
    case Hdf5Type::u32:
      return H5T_NATIVE_UINT32;
    case Hdf5Type::u64:
      return H5T_NATIVE_UINT64;
    case Hdf5Type::i64:
      return H5T_NATIVE_INT64;
    case Hdf5Type::other:
      break;
  }
  fail("no native HDF5 type for this element type");
}

std::string describe_type(hid_t type) {
  const size_t bits = 8 * H5Tget_size(type);
  const char* order = H5Tget_order(type) == H5T_ORDER_BE ? " big-endian" : "";
  switch (H5Tget_class(type)) {
    case H5T_INTEGER:
      return fmt::format("{}{}{}", H5Tget_sign(type) == H5T_SGN_NONE ? "u" : "i", bits, order);
    case H5T_FLOAT:
      return fmt::format("f{}{}", bits, order);
    case H5T_STRING:
      return "text";
    default:
      return fmt::format("another type of {} bits", bits);
  }
}

void describe_layout(hid_t properties, Hdf5Dataset& info) {
  switch (H5Pget_layout(properties)) {
    case H5D_CONTIGUOUS:
      info.layout = "contiguous";
      break;
    case H5D_COMPACT:
      info.layout = "compact";
      break;
    case H5D_CHUNKED:
      info.layout = "chunked";
      break;
    default:
      info.layout = "virtual";
  }
  const bool filtered = H5Pget_nfilters(properties) > 0;
  const bool external = H5Pget_external_count(properties) > 0;
  if (filtered) info.layout += ", compressed";
  if (external) info.layout += ", in external files";
  info.contiguous = info.layout == "contiguous";
}

// A selection of whole rows of a dataset: where in the file, and as many elements in memory.
struct RowSelection {
  Handle dataset, file_space, memory_space;
};

RowSelection select_rows(Handle dataset, const std::string& path, const std::string& name,
                         Hdf5Type type, int64_t first, int64_t numel) {
  const Handle stored(H5Dget_type(dataset), path, "get the type of " + name);
  if (check(H5Tequal(stored, native_type(type)), path, "compare the types of " + name) == 0)
    fail("{}: dataset {} holds {}, expected {}", path, name, describe_type(stored),
         kTypes[static_cast<int>(type)].name);
  Handle space(H5Dget_space(dataset), path, "get the shape of " + name);
  const int rank = check(H5Sget_simple_extent_ndims(space), path, "get the shape of " + name);
  std::vector<hsize_t> shape(rank), start(rank, 0);
  check(H5Sget_simple_extent_dims(space, shape.data(), nullptr), path, "get the shape of " + name);
  int64_t row = 1;
  for (int i = 1; i < rank; ++i) row *= static_cast<int64_t>(shape[i]);
  const int64_t rows = rank > 0 ? static_cast<int64_t>(shape[0]) : 0;
  QS_CHECK(rank > 0 && row > 0 && numel % row == 0 && first >= 0 && first + numel / row <= rows,
           "{}: dataset {}: rows from {} on, {} elements, do not lie in {} rows of {} elements",
           path, name, first, numel, rows, row);
  std::vector<hsize_t> count = shape;
  start[0] = static_cast<hsize_t>(first);
  count[0] = static_cast<hsize_t>(numel / row);
  const hid_t space_id = space;
  check(numel == 0 ? H5Sselect_none(space_id)
                   : H5Sselect_hyperslab(space_id, H5S_SELECT_SET, start.data(), nullptr,
                                         count.data(), nullptr),
        path, "select rows of " + name);
  const hsize_t elements = static_cast<hsize_t>(numel);
  Handle memory(H5Screate_simple(1, &elements, nullptr), path, "describe the memory of " + name);
  return {std::move(dataset), std::move(space), std::move(memory)};
}

}  // namespace

std::string hdf5_version() {
  unsigned major = 0, minor = 0, release = 0;
  H5get_libversion(&major, &minor, &release);
  return fmt::format("HDF5 {}.{}.{}", major, minor, release);
}

std::vector<std::pair<std::string, std::string>> parse_hints(const std::string& text) {
  std::vector<std::pair<std::string, std::string>> hints;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string pair = text.substr(at, end - at);
    const size_t equals = pair.find('=');
    if (equals == std::string::npos || equals == 0)
      fail_usage("MPI-IO hints are key=value,key=value; found '{}'", pair);
    hints.emplace_back(pair.substr(0, equals), pair.substr(equals + 1));
    at = end + 1;
  }
  return hints;
}

Hdf5File Hdf5File::open(const std::string& path) {
  silence_hdf5();
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), path, "create access properties");
  disable_locking(access, path);
  return {path, check(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access), path, "open this HDF5 file")};
}

Hdf5File Hdf5File::create(const std::string& path) { return create_aligned(path, 1); }

Hdf5File Hdf5File::create_aligned(const std::string& path, int64_t alignment) {
  silence_hdf5();
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), path, "create access properties");
  disable_locking(access, path);
  const hsize_t bytes = static_cast<hsize_t>(alignment);
  check(H5Pset_alignment(access, bytes, bytes), path, "set the alignment");
  // [Note: File format] The oldest one in which HDF5 keeps a checksum of each of its structures,
  // and of these only object headers: from damaged heaps and trees version 1.10 may crash.
  check(H5Pset_libver_bounds(access, H5F_LIBVER_V18, H5F_LIBVER_LATEST), path,
        "choose the file format");
  const Handle create(H5Pcreate(H5P_FILE_CREATE), path, "create creation properties");
  check(H5Pset_attr_phase_change(create, kMaxCompact, kMaxCompact), path, "place the attributes");
  check(H5Pset_link_phase_change(create, kMaxCompact, kMaxCompact), path, "place the names");
  return {path, check(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, create, access), path,
                      "create this HDF5 file")};
}

Hdf5File Hdf5File::open_for_change(const std::string& path) {
  silence_hdf5();
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), path, "create access properties");
  disable_locking(access, path);
  return {path, check(H5Fopen(path.c_str(), H5F_ACC_RDWR, access), path, "open this HDF5 file")};
}

Hdf5File Hdf5File::open_parallel(const std::string& path, MPI_Comm comm, const std::string& hints,
                                 bool collective) {
  silence_hdf5();
  const auto parsed = parse_hints(hints);
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), path, "create access properties");
  disable_locking(access, path);
  MPI_Info info = MPI_INFO_NULL;
  MPI_Info_create(&info);
  for (const auto& [key, value] : parsed) MPI_Info_set(info, key.c_str(), value.c_str());
  const herr_t chosen = H5Pset_fapl_mpio(access, comm, info);  // keeps a copy of info
  MPI_Info_free(&info);
  check(chosen, path, "choose MPI-IO");
  check(H5Pset_all_coll_metadata_ops(access, true), path, "read metadata once for all ranks");
  const hid_t id = H5Fopen(path.c_str(), H5F_ACC_RDWR, access);
  Hdf5File file(path, check(id, path, "open this HDF5 file for all ranks"));
  file.parallel_ = true;
  file.collective_ = collective;
  return file;
}

Hdf5File::Hdf5File(Hdf5File&& other) noexcept
    : path_(std::move(other.path_)),
      id_(std::exchange(other.id_, H5I_INVALID_HID)),
      kept_(std::exchange(other.kept_, {})),
      parallel_(other.parallel_),
      collective_(other.collective_) {}

Hdf5File::~Hdf5File() {
  close_datasets();
  if (id_ >= 0) H5Fclose(id_);
}

void Hdf5File::abandon() {
  kept_.clear();
  id_ = H5I_INVALID_HID;
}

void Hdf5File::close_datasets() {
  for (const auto& [name, id] : std::exchange(kept_, {})) H5Dclose(id);
}

void Hdf5File::close() {
  if (id_ < 0) return;
  close_datasets();
  if (!parallel_) check(H5Fflush(id_, H5F_SCOPE_LOCAL), path_, "write the last data");
  check(H5Fclose(std::exchange(id_, H5I_INVALID_HID)), path_, "close");
}

bool Hdf5File::contains(const std::string& name) const {
  // Every group on the way has to exist, or H5Lexists is an error.
  for (size_t slash = name.find('/', 1);; slash = name.find('/', slash + 1)) {
    const std::string part = name.substr(0, slash);
    if (check(H5Lexists(id_, part.c_str(), H5P_DEFAULT), path_, "look up " + part) == 0)
      return false;
    if (slash == std::string::npos) return true;
  }
}

void Hdf5File::write_attribute(const std::string& name, int64_t value, const std::string& object) {
  const std::string what = fmt::format("write attribute {} of {}", name, object);
  const Handle space(H5Screate(H5S_SCALAR), path_, what);
  const Handle attribute(H5Acreate_by_name(id_, object.c_str(), name.c_str(), H5T_STD_I64LE, space,
                                           H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                         path_, what);
  check(H5Awrite(attribute, H5T_NATIVE_INT64, &value), path_, what);
}

void Hdf5File::set_attribute(const std::string& name, int64_t value, const std::string& object) {
  const std::string what = fmt::format("write attribute {} of {}", name, object);
  const Handle holder(H5Oopen(id_, object.c_str(), H5P_DEFAULT), path_, what);
  const Handle attribute(H5Aopen(holder, name.c_str(), H5P_DEFAULT), path_, what);
  check(H5Awrite(attribute, H5T_NATIVE_INT64, &value), path_, what);
}

void Hdf5File::write_attribute(const std::string& name, const std::string& value) {
  const std::string what = "write attribute " + name;
  const Handle space(H5Screate(H5S_SCALAR), path_, what);
  const Handle type(H5Tcopy(H5T_C_S1), path_, what);
  check(H5Tset_size(type, value.size() + 1), path_, what);
  check(H5Tset_cset(type, H5T_CSET_UTF8), path_, what);
  const Handle attribute(H5Acreate2(id_, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT),
                         path_, what);
  check(H5Awrite(attribute, type, value.c_str()), path_, what);
}

bool Hdf5File::has_attribute(const std::string& name, const std::string& object) const {
  return check(H5Aexists_by_name(id_, object.c_str(), name.c_str(), H5P_DEFAULT), path_,
               fmt::format("look up attribute {} of {}", name, object)) > 0;
}

int64_t Hdf5File::int_attribute(const std::string& name, const std::string& object) const {
  const std::string what = fmt::format("read attribute {} of {}", name, object);
  const Handle attribute(
      H5Aopen_by_name(id_, object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT), path_, what);
  const Handle type(H5Aget_type(attribute), path_, what);
  const Handle space(H5Aget_space(attribute), path_, what);
  if (H5Tget_class(type) != H5T_INTEGER || H5Sget_simple_extent_npoints(space) != 1)
    fail("{}: attribute {} is not one integer but {}", path_, name, describe_type(type));
  int64_t value = 0;
  check(H5Aread(attribute, H5T_NATIVE_INT64, &value), path_, what);
  return value;
}

// Texts of fixed length (ours) and of variable length (h5py's).
std::string Hdf5File::text_attribute(const std::string& name) const {
  const std::string what = "read attribute " + name;
  const Handle attribute(H5Aopen(id_, name.c_str(), H5P_DEFAULT), path_, what);
  const Handle type(H5Aget_type(attribute), path_, what);
  const Handle space(H5Aget_space(attribute), path_, what);
  if (H5Tget_class(type) != H5T_STRING || H5Sget_simple_extent_npoints(space) != 1)
    fail("{}: attribute {} is not one text but {}", path_, name, describe_type(type));
  const Handle memory(H5Tcopy(type), path_, what);
  if (check(H5Tis_variable_str(type), path_, what) > 0) {
    char* text = nullptr;
    check(H5Aread(attribute, memory, &text), path_, what);
    std::string value = text ? text : "";
    H5free_memory(text);
    return value;
  }
  const size_t size = H5Tget_size(type);
  if (size > kMaxTextBytes)
    fail("{}: attribute {} has {} bytes, expected at most {}", path_, name, size, kMaxTextBytes);
  std::string value(size, '\0');
  check(H5Aread(attribute, memory, value.data()), path_, what);
  return value.substr(0, value.find('\0'));
}

std::vector<std::string> Hdf5File::datasets() const {
  std::vector<std::string> names;
  const auto visit = [](hid_t, const char* name, const H5O_info_t* info, void* data) -> herr_t {
    if (info->type == H5O_TYPE_DATASET)
      static_cast<std::vector<std::string>*>(data)->push_back(fmt::format("/{}", name));
    return 0;
  };
#if H5_VERSION_GE(1, 12, 0)
  check(H5Ovisit3(id_, H5_INDEX_NAME, H5_ITER_INC, visit, &names, H5O_INFO_BASIC), path_,
        "list datasets");
#else
  check(H5Ovisit2(id_, H5_INDEX_NAME, H5_ITER_INC, visit, &names, H5O_INFO_BASIC), path_,
        "list datasets");
#endif
  return names;
}

Hdf5Dataset Hdf5File::dataset(const std::string& name) const {
  const Handle dataset(H5Dopen2(id_, name.c_str(), H5P_DEFAULT), path_, "open dataset " + name);
  const Handle type(H5Dget_type(dataset), path_, "get the type of " + name);
  const Handle space(H5Dget_space(dataset), path_, "get the shape of " + name);
  const Handle properties(H5Dget_create_plist(dataset), path_, "get the layout of " + name);
  Hdf5Dataset info;
  info.type_text = describe_type(type);
  for (const TypeName& known : kTypes)
    if (H5Tequal(type, native_type(known.type)) > 0) info.type = known.type;
  const int rank = check(H5Sget_simple_extent_ndims(space), path_, "get the shape of " + name);
  std::vector<hsize_t> shape(rank);
  check(H5Sget_simple_extent_dims(space, shape.data(), nullptr), path_, "get the shape of " + name);
  info.shape.assign(shape.begin(), shape.end());
  describe_layout(properties, info);
  const haddr_t offset = info.contiguous ? H5Dget_offset(dataset) : HADDR_UNDEF;
  if (offset == HADDR_UNDEF) {
    H5Eclear2(H5E_DEFAULT);  // a dataset without storage has no offset
  } else {
    info.file_offset = static_cast<int64_t>(offset);
  }
  return info;
}

void Hdf5File::create_dataset(const std::string& name, Hdf5Type type,
                              const std::vector<int64_t>& shape) {
  const std::string what = "create dataset " + name;
  const std::vector<hsize_t> dims(shape.begin(), shape.end());
  const Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), path_,
                     what);
  const Handle create(H5Pcreate(H5P_DATASET_CREATE), path_, what);
  check(H5Pset_layout(create, H5D_CONTIGUOUS), path_, what);
  check(H5Pset_alloc_time(create, H5D_ALLOC_TIME_EARLY), path_, what);
  check(H5Pset_fill_time(create, H5D_FILL_TIME_NEVER), path_, what);
  const Handle link(H5Pcreate(H5P_LINK_CREATE), path_, what);
  check(H5Pset_create_intermediate_group(link, 1), path_, what);
  const Handle dataset(
      H5Dcreate2(id_, name.c_str(), native_type(type), space, link, create, H5P_DEFAULT), path_,
      what);
}

void Hdf5File::keep_open(const std::string& name) {
  if (kept_.contains(name)) return;
  kept_[name] = check(H5Dopen2(id_, name.c_str(), H5P_DEFAULT), path_, "open dataset " + name);
}

int64_t Hdf5File::open_dataset(const std::string& name) const {
  const auto kept = kept_.find(name);
  if (kept == kept_.end()) return H5Dopen2(id_, name.c_str(), H5P_DEFAULT);
  H5Iinc_ref(kept->second);
  return kept->second;
}

void Hdf5File::write_rows(const std::string& name, Hdf5Type type, int64_t first, int64_t numel,
                          const void* from) {
  if (numel == 0 && !parallel_) return;
  const RowSelection rows = select_rows({open_dataset(name), path_, "open dataset " + name}, path_,
                                        name, type, first, numel);
  const Handle transfer(H5Pcreate(H5P_DATASET_XFER), path_, "create transfer properties");
  if (collective_)
    check(H5Pset_dxpl_mpio(transfer, H5FD_MPIO_COLLECTIVE), path_, "choose collective transfers");
  check(
      H5Dwrite(rows.dataset, native_type(type), rows.memory_space, rows.file_space, transfer, from),
      path_, fmt::format("write {} elements of dataset {}", numel, name));
}

void Hdf5File::read_rows(const std::string& name, Hdf5Type type, int64_t first, int64_t numel,
                         void* to) const {
  if (numel == 0) return;
  const RowSelection rows = select_rows({open_dataset(name), path_, "open dataset " + name}, path_,
                                        name, type, first, numel);
  check(
      H5Dread(rows.dataset, native_type(type), rows.memory_space, rows.file_space, H5P_DEFAULT, to),
      path_, fmt::format("read {} elements of dataset {}", numel, name));
}

}  // namespace qshard
