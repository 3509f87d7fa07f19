// Memory that lives as long as a program: large mappings on huge pages where the system gives them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tenfold {

// One anonymous mapping, zeroed, freed with its owner. Throws std::bad_alloc.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(size_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Hands out 64-byte aligned stretches one after another, so that matrices used one after another lie side by side and
// small ones share huge pages.
class Arena {
 public:
  uint8_t* take(size_t bytes);
  size_t used() const { return used_; }

 private:
  std::vector<Mapping> blocks_;
  size_t offset_ = 0, used_ = 0;
};

}  // namespace tenfold
