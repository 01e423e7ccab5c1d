// `packed`. The comparison reads both tensors once; the rest accesses the cache lines that contain a change.
#include "common/blocks.h"
#include "patch_tiles.h"

namespace sparse_opt::cpu {
namespace {

class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : begin_(out), out_(out) {}

  // width <= 64, value < 2^width
  void put(uint64_t value, int width) {
    buffer_ |= value << filled_;
    filled_ += width;
    if (filled_ < 64) return;
    std::memcpy(out_, &buffer_, 8);
    out_ += 8;
    filled_ -= 64;
    buffer_ = filled_ == 0 ? 0 : value >> (width - filled_);
  }

  void put_bits(const uint64_t* bits, int64_t n) {
    for (int64_t k = 0; k < n; k += 64) put(bits[k / 64], static_cast<int>(std::min<int64_t>(64, n - k)));
  }

  // Flushes the stream, and returns its length in bytes, padded to a multiple of kRecordUnit.
  int64_t finish() {
    std::memcpy(out_, &buffer_, 8);
    return rounded_up(out_ - begin_ + (filled_ + 7) / 8, kRecordUnit);
  }

 private:
  uint8_t* begin_;
  uint8_t* out_;
  uint64_t buffer_ = 0;
  int filled_ = 0;
};

// Reads bits of a record at any place.
class BitReader {
 public:
  explicit BitReader(Record record) : record_(record) {}

  int64_t size() const { return 8 * record_.bytes; }
  bool bit(int64_t at) const { return (record_.data[at / 8] >> (at % 8) & 1) != 0; }

  // at + width <= size(), width <= 64
  uint64_t read(int64_t at, int width) const {
    if (width > 32) return read(at, 32) | read(at + 32, width - 32) << 32;
    uint64_t bytes = 0;
    std::memcpy(&bytes, record_.data + at / 8, std::min<int64_t>(8, record_.bytes - at / 8));
    return bytes >> (at % 8) & ((uint64_t{1} << width) - 1);
  }

 private:
  Record record_;
};

template <typename Word>
int encode_tile(const PatchArguments& args, const Word* old_words, const Word* new_words, int t, uint16_t* head,
                uint16_t* units, std::vector<uint8_t>& out) {
  uint64_t bits[kPatchTile / 64] = {};
  const int n = static_cast<int>(mark_changes(sizeof(Word), old_words, new_words, t, bits));
  *head = *units = 0;
  if (n == 0) return 0;
  uint16_t positions[kPatchTile];
  Word rest[kPatchTile], big_words[kPatchTile];  // of big changes
  uint64_t signs[kPatchTile / 64] = {}, bigs[kPatchTile / 64] = {};
  int found = 0, m = 0;
  for_each_bit(bits, t, [&](int64_t position) {
    const Word word = new_words[position];
    const Change<Word> change = change_of(old_words[position], word, args.is_float);
    positions[found] = static_cast<uint16_t>(position);
    signs[found / 64] |= uint64_t{change.negative} << (found % 64);
    bigs[found / 64] |= uint64_t{change.magnitude > 1} << (found % 64);
    rest[m] = static_cast<Word>(change.magnitude - 2);
    big_words[m] = word;
    m += change.magnitude > 1 ? 1 : 0;
    ++found;
  });

  const int k = elias_fano_k(n, t), high = elias_fano_high(n, t, k);
  const int mode = n * k + high <= t ? kModeEliasFano : kModeBitmap;
  const size_t begin = out.size();
  const int64_t most_bits = std::min(n * k + high, t) + 2 * n + int64_t{m} * (args.width + kWordBits<Word>);
  out.resize(begin + most_bits / 8 + 16);  // the writer's last store may extend 8 bytes past that of the last bit
  BitWriter stream(out.data() + begin);
  if (mode == kModeEliasFano) {
    uint64_t upper[2 * kPatchTile / 64] = {};
    for (int i = 0; i < n; ++i) {
      stream.put(positions[i] & ((1u << k) - 1), k);
      const int at = (positions[i] >> k) + i;
      upper[at / 64] |= uint64_t{1} << (at % 64);
    }
    stream.put_bits(upper, high);
  } else {
    stream.put_bits(bits, t);
  }
  stream.put_bits(signs, n);
  stream.put_bits(bigs, n);
  const Word escape = static_cast<Word>((Word{1} << args.width) - 1);
  for (int i = 0; i < m; ++i) stream.put(std::min(rest[i], escape), args.width);
  for (int i = 0; i < m; ++i) {
    if (rest[i] >= escape) stream.put(big_words[i], kWordBits<Word>);
  }
  const int64_t length = stream.finish(), raw = rounded_up(static_cast<int64_t>(t) * sizeof(Word), kRecordUnit);
  const bool is_raw = raw < length;
  out.resize(is_raw ? begin : begin + length);
  if (is_raw) append_raw(new_words, static_cast<int64_t>(t) * sizeof(Word), kRecordUnit, out);
  *head = static_cast<uint16_t>(n | (is_raw ? kModeRaw : mode) << kModeShift);
  *units = static_cast<uint16_t>((is_raw ? raw : length) / kRecordUnit);
  return n;
}

// Reads section 1, which begins at bit 0, to positions [n]. Returns the bit after it, or -1 if the section is damaged.
int64_t read_positions(const BitReader& stream, int mode, int n, int t, uint16_t* positions) {
  const int k = mode == kModeBitmap ? 0 : elias_fano_k(n, t);
  const int64_t first = mode == kModeBitmap ? 0 : int64_t{n} * k;
  const int64_t length = mode == kModeBitmap ? t : elias_fano_high(n, t, k);
  if (first + length > stream.size()) return -1;
  int found = 0, last = -1;
  for (int64_t begin = 0; begin < length; begin += 64) {
    const int width = static_cast<int>(std::min<int64_t>(64, length - begin));
    for (uint64_t rest = stream.read(first + begin, width); rest != 0; rest &= rest - 1) {
      if (found == n) return -1;
      int position = static_cast<int>(begin) + std::countr_zero(rest);
      if (mode != kModeBitmap) {
        position = ((position - found) << k) + static_cast<int>(stream.read(int64_t{found} * k, k));
      }
      if (position <= last || position >= t) return -1;
      positions[found++] = static_cast<uint16_t>(position);
      last = position;
    }
  }
  return found == n ? first + length : -1;
}

template <typename Word>
bool apply_tile(const PatchArguments& args, Word* words, int t, int mode, int n, Record record) {
  const BitReader stream(record);
  uint16_t positions[kPatchTile];
  const int64_t signs = read_positions(stream, mode, n, t, positions), bigs = signs + n;
  int64_t field = bigs + n;
  if (signs < 0 || field > stream.size()) return false;
  int64_t m = 0;
  for (int i = 0; i < n; i += 64) m += std::popcount(stream.read(bigs + i, std::min(64, n - i)));
  int64_t escaped = field + m * args.width;
  if (escaped > stream.size()) return false;
  const uint64_t escape = (uint64_t{1} << args.width) - 1;
  for (int i = 0; i < n; ++i) {
    Word& word = words[positions[i]];
    Change<Word> change{stream.bit(signs + i), 1};
    if (stream.bit(bigs + i)) {
      const uint64_t rest = stream.read(field, args.width);
      field += args.width;
      if (rest == escape) {
        if (escaped + kWordBits<Word> > stream.size()) return false;
        word = static_cast<Word>(stream.read(escaped, kWordBits<Word>));
        escaped += kWordBits<Word>;
        continue;
      }
      change.magnitude = static_cast<Word>(rest + 2);
    }
    word = moved(word, change, args.is_float);
  }
  const int64_t left = stream.size() - escaped;
  return left < 8 * kRecordUnit && stream.read(escaped, static_cast<int>(left)) == 0;
}

}  // namespace

int64_t encode_packed_tile(const PatchArguments& args, int64_t number, const PatchTile& tile,
                           std::vector<uint8_t>& out) {
  return with_word(args.element_size, [&](auto word) {
    using Word = decltype(word);
    return encode_tile(args, static_cast<const Word*>(args.old_tensors[tile.tensor]) + tile.begin,
                       static_cast<const Word*>(args.new_tensors[tile.tensor]) + tile.begin,
                       static_cast<int>(tile.size), args.heads + number, static_cast<uint16_t*>(args.sizes) + number,
                       out);
  });
}

bool apply_packed_tile(const PatchArguments& args, int64_t number, const PatchTile& tile, Record record) {
  const auto head = number_at<uint16_t>(args.heads, number);
  const int n = static_cast<int>(head & kCountMask), mode = head >> kModeShift, t = static_cast<int>(tile.size);
  if (n > t || mode > kModeRaw || (n == 0) != (record.bytes == 0) || (n == 0 && head != 0)) return false;
  if (n == 0) return true;
  if (mode == kModeRaw) {
    const int64_t bytes = tile.size * args.element_size;
    if (record.bytes != rounded_up(bytes, kRecordUnit)) return false;
    std::memcpy(at(args.old_tensors[tile.tensor], tile.begin, args.element_size), record.data, bytes);
    return true;
  }
  return with_word(args.element_size, [&](auto word) {
    auto* words = static_cast<decltype(word)*>(args.old_tensors[tile.tensor]) + tile.begin;
    return apply_tile(args, words, t, mode, n, record);
  });
}

}  // namespace sparse_opt::cpu
