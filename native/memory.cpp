#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <utility>

namespace tenfold {
namespace {

[[maybe_unused]] constexpr size_t kHuge = size_t{2} << 20;
[[maybe_unused]] constexpr size_t kBlock = size_t{64} << 20;  // address space only: untouched pages cost nothing

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

#if defined(__SANITIZE_ADDRESS__)

// Under the sanitizer every mapping and every stretch of an arena comes from its heap, where both ends are watched.
Mapping::Mapping(size_t bytes) : size_(round_up(bytes == 0 ? 1 : bytes, 64)) {
  data_ = new (std::align_val_t{4096}) uint8_t[size_];
  std::memset(data_, 0, size_);
}

Mapping::~Mapping() { operator delete[](data_, std::align_val_t{4096}); }

#else

Mapping::Mapping(size_t bytes) : size_(round_up(bytes == 0 ? 1 : bytes, 4096)) {
  void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(p);
  if (size_ >= kHuge) madvise(p, size_, MADV_HUGEPAGE);
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, size_);
}

#endif

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

uint8_t* Arena::take(size_t bytes) {
  bytes = round_up(bytes, 64);
#if defined(__SANITIZE_ADDRESS__)
  blocks_.emplace_back(bytes);
  offset_ = 0;
#else
  if (blocks_.empty() || offset_ + bytes > blocks_.back().size()) {
    blocks_.emplace_back(bytes > kBlock ? round_up(bytes, kHuge) : kBlock);
    offset_ = 0;
  }
#endif
  uint8_t* p = blocks_.back().data() + offset_;
  offset_ += bytes;
  used_ += bytes;
  return p;
}

}  // namespace tenfold
