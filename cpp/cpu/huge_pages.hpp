// Huge pages behind large tensors of the processor.
#pragma once

#include <cstdint>
#include <string_view>

namespace fusedconv::cpu {

// Asks for huge pages behind a large tensor that is about to be written for the first time: with
// small ones the faults take longer than the kernel. Does nothing where memory has too few pieces
// of that size: Linux would make room at every fault, which takes several times as long.
void advise_huge_pages(void* data, int64_t bytes);

// Free bytes in pieces of at least so many bytes, all zones together, from the text of
// /proc/buddyinfo: counts of free pieces of 1, 2, 4, ... pages by zone. 0 where it says nothing.
int64_t free_bytes_in_pieces(std::string_view buddyinfo, int64_t page_bytes, int64_t piece_bytes);

}  // namespace fusedconv::cpu
