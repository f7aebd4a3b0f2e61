// A whole layer around ring attention: norms, products, residual additions and the feed-forward network.
#pragma once

#include "node.hpp"

namespace xl {

/// A node of a layer. Its first input is the layer's input x; the inputs of attention are as in `Attention`.
template <class Stored>
class Layer : public Attention<Stored> {
 public:
  static constexpr size_t INPUTS = 36;
  static bool has_any_type(size_t input) {
    return input == 1 || input > 18 || Attention<Stored>::has_any_type(input);
  }

  Layer(const OrtApi& ort, const OrtKernelInfo* info) : Attention<Stored>(ort, info) {
    this->all_of_step_ = true;
    pre_norm_ = this->attribute(info, "pre_norm") != 0;
    norm_epsilon_ = this->attribute(info, "norm_epsilon", 0);
    projection_ = this->packed(this->given(1, 19, 20, false), NO_INPUT);
    out_ = this->packed(this->given(21, 22, 23, false), NO_INPUT);
    expand_ = this->packed(this->given(26, 27, 28, false), 29);
    contract_ = this->packed(this->given(30, 31, 32, false), 33);
    width_ = out_.columns();
    this->expect(norm_epsilon_ > 0 && projection_ && out_ && !expand_ == !contract_);
    this->expect(reads(projection_, width_) && reads(out_, this->heads * this->head_dim));
    if (expand_)
      this->expect(reads(expand_, width_) && reads(contract_, expand_.columns()) && contract_.columns() == width_);
    first_ = norm(24, 25);
    if (expand_) second_ = norm(34, 35);
  }

  void compute(OrtKernelContext* context) const {
    const Tensor x = this->input(context, 0, 3);
    this->expect(x.sizes[2] == width_);
    const int64_t rows = x.sizes[0] * x.sizes[1], pitch = pitch_of(width_);
    const int64_t projected = pitch_of(projection_.columns()), answered = pitch_of(this->heads * this->head_dim);
    const int64_t inner = pitch_of(expand_.columns());
    static thread_local Scratch rows_of_thread;  // the tasks of products and attention use `scratch`
    float* at = rows_of_thread.take(rows * (2 * pitch + projected + answered + inner));
    const auto next = [&at](int64_t floats) { return std::exchange(at, at + floats); };
    float *stream = next(rows * pitch), *normed = next(rows * pitch), *packed = next(rows * projected);
    float *answers = next(rows * answered), *hidden = next(rows * inner);
    std::memset(answers, 0, rows * answered * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(x.floats(r * width_), width_, stream + r * pitch);
      std::fill(stream + r * pitch + width_, stream + (r + 1) * pitch, 0.0f);
    }

    typename Attention<Stored>::Call call;
    call.query = call.context = {packed, TYPE_OF<float>, {x.sizes[0], x.sizes[1], projected}};
    this->take(context, call);
    call.answers = answers, call.answer_pitch = answered;
    this->multiply(context, projection_, rows, before(first_, rows, stream, normed), packed);
    this->attend(context, call);
    this->multiply(context, out_, rows, answers, stream, true);
    after(first_, rows, stream);
    if (expand_) {
      this->multiply(context, expand_, rows, before(second_, rows, stream, normed), hidden, false,
                     Activation::RELU);
      this->multiply(context, contract_, rows, hidden, stream, true);
      after(second_, rows, stream);
    }
    float* y = static_cast<float*>(this->output(context, 0, x.sizes));
    for (int64_t r = 0; r < rows; ++r) std::copy_n(stream + r * pitch, width_, y + r * width_);
  }

 private:
  struct Norm {
    std::vector<float> weight, bias;
  };

  Matrix projection_, out_, expand_, contract_;
  Norm first_, second_;
  int64_t width_ = 0;  // D
  bool pre_norm_ = false;
  float norm_epsilon_ = 0;

  /// Whether a matrix multiplies rows of `width` numbers; blocks are known only up to their padding.
  static bool reads(const Matrix& matrix, int64_t width) {
    return pitch_of(matrix.depth()) == pitch_of(width);
  }

  Norm norm(size_t weight, size_t bias) const {
    Norm norm;
    for (auto [index, to] : {std::pair{weight, &norm.weight}, {bias, &norm.bias}}) {
      const Tensor given = this->constant(index, 1);
      this->expect(given.type == TYPE_OF<float> && given.sizes == Sizes({width_}));
      to->assign(given.floats(), given.floats() + width_);
    }
    return norm;
  }

  /// What a sublayer reads: the stream, normalised into `to` if norms come before.
  const float* before(const Norm& norm, int64_t rows, const float* stream, float* to) const {
    if (!pre_norm_) return stream;
    normalise(norm, rows, stream, to);
    return to;
  }

  void after(const Norm& norm, int64_t rows, float* stream) const {
    if (!pre_norm_) normalise(norm, rows, stream, stream);
  }

  void normalise(const Norm& norm, int64_t rows, const float* from, float* to) const {
    const int64_t pitch = pitch_of(width_);
    for (int64_t r = 0; r < rows; ++r, from += pitch, to += pitch) {
      xl::normalise(from, width_, norm.weight.data(), norm.bias.data(), norm_epsilon_, to);
      std::fill(to + width_, to + pitch, 0.0f);
    }
  }
};

/// A node of one product with a constant matrix: rows [B, T, K] or [N, K] times W, plus a bias.
class Product : public Node {
 public:
  using Ring = float;
  static constexpr size_t INPUTS = 5, OUTPUTS = 1;
  static bool has_any_type(size_t input) { return input > 0; }

  Product(const OrtApi& ort, const OrtKernelInfo* info)
      : Node(ort, info),
        matrix_(packed(given(1, 2, 3, attribute(info, "turned") != 0), 4)) {
    expect(!!matrix_);
    all_of_step_ = true;
  }

  void compute(OrtKernelContext* context) const {
    Tensor x = input(context, 0, ANY_RANK);
    const int64_t width = x.sizes.back(), columns = matrix_.columns();
    const int64_t from_pitch = pitch_of(width), to_pitch = pitch_of(columns);
    expect(from_pitch == pitch_of(matrix_.depth()));
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < x.sizes.size(); ++i) rows *= x.sizes[i];
    x.sizes.back() = columns;
    float* y = static_cast<float*>(output(context, 0, x.sizes));
    // Rows that are no multiple of a pitch are copied to where they may be read and written in whole vectors.
    static thread_local Scratch rows_of_thread;
    float* copies = rows_of_thread.take(rows * (from_pitch + to_pitch));
    const bool whole_in = from_pitch == width, whole_out = to_pitch == columns;
    for (int64_t r = 0; !whole_in && r < rows; ++r) {
      std::copy_n(x.floats(r * width), width, copies + r * from_pitch);
      std::fill(copies + r * from_pitch + width, copies + (r + 1) * from_pitch, 0.0f);
    }
    float* out = whole_out ? y : copies + rows * from_pitch;
    multiply(context, matrix_, rows, whole_in ? x.floats() : copies, out);
    for (int64_t r = 0; !whole_out && r < rows; ++r) std::copy_n(out + r * to_pitch, columns, y + r * columns);
  }

 private:
  Matrix matrix_;
};

/// A node that looks up rows of a constant table [V, D]: x [B, T, D] = factor · table[ids [B, T]].
class Rows : public Node {
 public:
  using Ring = float;
  static constexpr size_t INPUTS = 4, OUTPUTS = 1;
  static bool has_any_type(size_t) { return true; }

  Rows(const OrtApi& ort, const OrtKernelInfo* info)
      : Node(ort, info), table_(given(1, 2, 3, true)), width_(attribute(info, "width")),
        factor_(attribute(info, "factor", 1)) {
    expect(table_.values && 0 < width_ && pitch_of(width_) == pitch_of(table_.depth));
    expect(width_ <= table_.depth);
  }

  void compute(OrtKernelContext* context) const {
    const Tensor ids = input(context, 0, 2);
    expect(ids.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
    const int64_t rows = ids.sizes[0] * ids.sizes[1];
    float* y = static_cast<float*>(output(context, 0, {ids.sizes[0], ids.sizes[1], width_}));
    for (int64_t r = 0; r < rows; ++r, y += width_) {
      const int64_t id = static_cast<const int64_t*>(ids.data)[r];
      expect(0 <= id && id < table_.columns);
      table_.read(id, 1, [&](int64_t k, int64_t, auto number) {
        if (k >= width_) return;  // the padding of the last block
        const int64_t block = table_.blocks() > 1 ? k / BLOCK_DEPTH : 0;
        const bool scaled = table_.form != GivenMatrix::FLOATS;
        y[k] = factor_ * (scaled ? (number - table_.zero_point(id, block)) * table_.scale(id, block) : number);
      });
    }
  }

 private:
  GivenMatrix table_;
  int64_t width_;
  float factor_;
};

}  // namespace xl
