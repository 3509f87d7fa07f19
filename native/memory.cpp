#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace tenfold {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kBlock = size_t{64} << 20;  // address space only: untouched pages cost nothing

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

Mapping::Mapping(size_t bytes) : size_(round_up(bytes == 0 ? 1 : bytes, 4096)) {
  void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(p);
  if (size_ >= kHuge) madvise(p, size_, MADV_HUGEPAGE);
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, size_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

uint8_t* Arena::take(size_t bytes) {
  bytes = round_up(bytes, 64);
  if (blocks_.empty() || offset_ + bytes > blocks_.back().size()) {
    blocks_.emplace_back(bytes > kBlock ? round_up(bytes, kHuge) : kBlock);
    offset_ = 0;
  }
  uint8_t* p = blocks_.back().data() + offset_;
  offset_ += bytes;
  used_ += bytes;
  return p;
}

}  // namespace tenfold
