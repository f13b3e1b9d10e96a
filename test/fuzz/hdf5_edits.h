// Edits of an HDF5 file that arbitrary bytes describe: attributes and datasets go, come with other
// types, values, shapes and layouts.
//
// [Note: Edit] First byte: what (modulo 5). 0 delete attribute; 1 integer or float attribute of a
// type and 8 bytes of value; 2 text attribute: length and bytes; 3 delete dataset; 4 dataset of a
// type, layout and shape. Names are picked by a byte from those that the file has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace qshard::fuzz {

// Applies edits until the bytes end; one that HDF5 refuses changes nothing.
void edit_hdf5(const std::string& path, const uint8_t* data, size_t size);

}  // namespace qshard::fuzz
