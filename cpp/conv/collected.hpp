// A family's table of compiled kernels, from the lists of its instance files.
#pragma once

#include <initializer_list>
#include <vector>

namespace fusedconv::conv {

// Every row that the instance files append, in their order.
template <class Row>
std::vector<Row> collected(std::initializer_list<void (*)(std::vector<Row>&)> files) {
  std::vector<Row> rows;
  for (auto const append : files) append(rows);
  return rows;
}

}  // namespace fusedconv::conv
