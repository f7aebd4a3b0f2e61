// Multiplies random rows by random matrices of bytes and nibbles, compares with sums in doubles, and prints the bits of
// all answers. The variants of one architecture must print the same.
#include <cmath>
#include <cstdio>
#include <random>

#include "layer.hpp"

namespace {

std::mt19937 source(1);  // the same numbers everywhere; distributions are not

int pick(int from, int to) { return from + int(source() % unsigned(to - from + 1)); }
float real() { return pick(-1000, 1000) * 1e-3f; }

/// The answers of a product, each added to `bits`; returns how far one is from doubles, in units of the sum of
/// the row's largest activation times each weight.
double furthest(xl::GivenMatrix given, int64_t rows, uint64_t& bits) {
  const int64_t depth = given.depth, columns = given.columns, blocks = given.blocks();
  std::vector<uint8_t> values(depth * columns * given.bits / 8), zeros(columns * blocks);
  std::vector<float> scales(columns * blocks), bias(columns);
  for (auto& value : values) value = uint8_t(pick(0, 255));
  for (auto& zero : zeros) zero = uint8_t(pick(0, 255));
  for (auto& scale : scales) scale = pick(1, 100) * 1e-4f;
  for (auto& number : bias) number = real();
  given.values = values.data(), given.zero_points = zeros.data(), given.scales = scales.data();
  const xl::Matrix matrix(given, bias.data());

  const int64_t x_pitch = xl::pitch_of(depth), y_pitch = xl::pitch_of(columns);
  std::vector<float> x(rows * x_pitch), y(rows * y_pitch);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < depth; ++k) x[r * x_pitch + k] = pick(0, 9) ? real() : 9 * real();
  xl::Scratch scratch;
  const xl::Rounded q = matrix.rounded(rows, x.data(), x_pitch, scratch);
  for (int64_t p = 0; p < matrix.panels(); ++p) {
    const int64_t at = matrix.first_column(p);
    matrix.multiply(p, rows, x.data(), x_pitch, q, matrix.bias() + at, 0, y.data() + at, y_pitch);
  }

  std::vector<double> weights(depth * columns);
  given.read(0, columns, [&](int64_t k, int64_t c, int number) {
    const int64_t block = given.form == xl::GivenMatrix::BLOCKS ? k / xl::BLOCK_DEPTH : 0;
    weights[k * columns + c] = (number - given.zero_point(c, block)) * double(given.scale(c, block));
  });
  double most = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const float largest = xl::largest_magnitude(x.data() + r * x_pitch, depth);
    for (int64_t c = 0; c < columns; ++c) {
      double sum = bias[c], size = std::fabs(bias[c]);
      for (int64_t k = 0; k < depth; ++k) {
        const double weight = weights[k * columns + c];
        sum += x[r * x_pitch + k] * weight, size += largest * std::fabs(weight);
      }
      const float answer = y[r * y_pitch + c];
      most = std::max(most, std::fabs(answer - sum) / size);
      bits = (bits ^ xl::bits_of(answer)) * 0x100000001b3;  // FNV-1a
    }
  }
  return most;
}

}  // namespace

int main() {
  using Given = xl::GivenMatrix;
  const struct { const char* name; Given::Form form; int bits; double tolerance; } kinds[] = {
      {"exact bytes", Given::BYTES, 8, 3e-7}, {"bytes", Given::BLOCKS, 8, 1.6e-5}, {"nibbles", Given::BLOCKS, 4, 1.6e-5}};
  bool wrong = false;
  for (const auto& kind : kinds)
    for (const int64_t depth : {32, 96, 544})
      for (const int64_t columns : {1, 7, 40, 133}) {
        uint64_t bits = 0xcbf29ce484222325;
        double most = 0;
        for (int64_t rows = 1; rows <= 14; ++rows)
          most = std::max(most, furthest({kind.form, nullptr, nullptr, nullptr, depth, columns, false, kind.bits}, rows, bits));
        std::printf("%s %ld x %ld: %016lx\n", kind.name, long(depth), long(columns), long(bits));
        if (!(most <= kind.tolerance)) wrong = true, std::fprintf(stderr, "%s: %g is too far\n", kind.name, most);
      }
  return wrong;
}
