// Looks into an ONNX file before ONNX Runtime gets it: which files it refers to, whether it can loop for
// ever, and whether it holds compiled code. Only the few fields that answer these questions are read
// (onnx.proto: ModelProto, GraphProto, NodeProto, TensorProto).
#ifndef XL_EXPORT_ONNX_FILE_HPP
#define XL_EXPORT_ONNX_FILE_HPP

#include <cstdint>
#include <string>
#include <string_view>

#include "utf8.hpp"

namespace xl_export::detail {

class OnnxFile {
 public:
  // Throws unless a graph takes its tensors from itself and one file only, and has no loop and no compiled
  // code. name: of the file, for the sentence. weights: the file that spec.json lists; empty for none.
  static void verify(std::string_view graph, const std::string& name, std::string_view weights) {
    OnnxFile(name, weights).read_model(graph);
  }

  // The same for a graph in ONNX Runtime's own format, which names no other files. It is a flatbuffer, in
  // which the name of an operator has its length before it and a zero after it.
  static void verify_ort(std::string_view graph, const std::string& name) {
    for (const std::string operation : {"Loop", "Scan", "SequenceMap", "EPContext"}) {
      const std::string stored = std::string{static_cast<char>(operation.size()), 0, 0, 0} + operation + '\0';
      if (graph.find(stored) != std::string_view::npos)
        throw OnnxFile(name, "").refused("has an operator " + operation + ", which no artefact has");
    }
  }

 private:
  OnnxFile(const std::string& name, std::string_view weights) : name_(name), weights_(weights) {}

  static constexpr int deepest = 16;  // graphs within graphs

  Error refused(const std::string& what) const {
    return Error(Fault::artefact, name_ + " " + what + "; export the artefact again.");
  }
  Error damaged() const { return refused("is not a readable ONNX file"); }

  std::uint64_t varint(std::string_view data, std::size_t& at) const {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (at >= data.size()) throw damaged();
      const auto byte = static_cast<unsigned char>(data[at++]);
      if (shift < 64) value |= std::uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    throw damaged();
  }

  // Calls visit(number, content) for each field of a message that is stored as bytes.
  template <class Visit>
  void fields(std::string_view data, Visit visit) const {
    for (std::size_t at = 0; at < data.size();) {
      const std::uint64_t tag = varint(data, at);
      if (tag >> 32) throw damaged();  // other readers drop these bits, and would see another field
      std::uint64_t length = 0;
      switch (tag & 7) {
        case 0:
          varint(data, at);
          continue;
        case 1:
          length = 8;
          break;
        case 2:
          length = varint(data, at);
          break;
        case 5:
          length = 4;
          break;
        default:
          throw damaged();
      }
      if (length > data.size() - at) throw damaged();
      if ((tag & 7) == 2) visit(tag >> 3, data.substr(at, length));
      at += length;
    }
  }

  void read_model(std::string_view data) const {
    fields(data, [&](std::uint64_t number, std::string_view model_part) {
      if (number == 7) read_graph(model_part, 0);
      if (number != 25) return;  // a function
      fields(model_part, [&](std::uint64_t inner, std::string_view content) {
        if (inner == 7) read_node(content, 0);
        if (inner == 11) read_attribute(content, 0);
      });
    });
  }

  void read_graph(std::string_view data, int depth) const {
    if (depth > deepest) throw damaged();
    fields(data, [&](std::uint64_t number, std::string_view content) {
      if (number == 1) read_node(content, depth);
      // Initializers of the graph itself are the only tensors that ONNX Runtime takes from the verified
      // bytes.
      if (number == 5) read_tensor(content, depth == 0);
      if (number == 15) read_sparse(content);
    });
  }

  void read_node(std::string_view data, int depth) const {
    fields(data, [&](std::uint64_t number, std::string_view content) {
      if (number == 5) read_attribute(content, depth);
      if (number != 4) return;  // the operator
      if (content == "Loop" || content == "Scan" || content == "SequenceMap")
        throw refused("has a " + std::string(content) +
                      " operator, which may never end, and no step needs one");
      if (content == "EPContext")
        throw refused("has an EPContext operator, which holds compiled code, and no artefact has one");
    });
  }

  void read_attribute(std::string_view data, int depth) const {
    fields(data, [&](std::uint64_t number, std::string_view content) {
      if (number == 5 || number == 10) read_tensor(content, false);
      if (number == 6 || number == 11) read_graph(content, depth + 1);
      if (number == 22 || number == 23) read_sparse(content);
    });
  }

  void read_sparse(std::string_view data) const {
    fields(data, [&](std::uint64_t number, std::string_view content) {
      if (number == 1 || number == 2) read_tensor(content, false);
    });
  }

  void read_tensor(std::string_view data, bool may_be_external) const {
    fields(data, [&](std::uint64_t number, std::string_view entry) {
      if (number != 13) return;  // where a tensor outside of the file lies
      std::string_view key, value;
      fields(entry, [&](std::uint64_t inner, std::string_view content) {
        if (inner == 1) key = content;
        if (inner == 2) value = content;
      });
      if (key == "location" && (!may_be_external || weights_.empty() || value != weights_))
        throw refused("takes a tensor from the file " + shown(value) +
                      ", which the artefact's spec does not list");
    });
  }

  const std::string& name_;
  std::string_view weights_;
};

}  // namespace xl_export::detail

#endif
