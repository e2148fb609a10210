#include "cpu/huge_pages.hpp"

#include <sstream>
#include <string>

#ifdef __linux__
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace fusedconv::cpu {
namespace {

constexpr int64_t kLeastBytes = 16 << 20;  // of a tensor
constexpr int64_t kHugePage = 2 << 20;
// Pieces that must be free, over those that a tensor takes: others take some meanwhile.
constexpr int64_t kFreePieces = 2;

#if defined(__linux__) && defined(MADV_HUGEPAGE)

// Empty where the file cannot be read.
std::string read_file(char const* path) {
  int const file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  std::string text(1 << 14, '\0');
  std::size_t size = 0;
  for (ssize_t count; (count = read(file, text.data() + size, text.size() - size)) > 0;) {
    size += std::size_t(count);
    if (size == text.size()) text.resize(2 * size);
  }
  close(file);
  text.resize(size);
  return text;
}

#endif

}  // namespace

int64_t free_bytes_in_pieces(std::string_view buddyinfo, int64_t page_bytes, int64_t piece_bytes) {
  std::istringstream lines{std::string(buddyinfo)};
  int64_t total = 0;
  for (std::string line; std::getline(lines, line);) {
    // Node 0, zone   Normal      1      2    145 ...
    std::istringstream words(line);
    std::string node, number, zone, name;
    words >> node >> number >> zone >> name;
    if (zone != "zone") continue;
    int64_t bytes = page_bytes;
    for (int64_t count; words >> count; bytes *= 2) {
      if (bytes >= piece_bytes) total += count * bytes;
    }
  }
  return total;
}

void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (bytes < kLeastBytes) return;
  uintptr_t const begin = reinterpret_cast<uintptr_t>(data);
  uintptr_t const first = (begin + kHugePage - 1) & ~uintptr_t(kHugePage - 1);
  uintptr_t const last = (begin + uintptr_t(bytes)) & ~uintptr_t(kHugePage - 1);
  if (first >= last) return;
  int64_t const free =
      free_bytes_in_pieces(read_file("/proc/buddyinfo"), sysconf(_SC_PAGESIZE), kHugePage);
  if (free < kFreePieces * int64_t(last - first)) return;
  // Advice: where the kernel has no huge pages, the result is the same.
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace fusedconv::cpu
