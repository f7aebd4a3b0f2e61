// Language models with segment recurrence in C++17: artefacts of xl-export on ONNX Runtime.
//
//   auto session = xl_export::Session::open("artefact");
//   auto memory = session.start();
//   xl_export::generate(session, memory, "Once upon a time", {},
//                       [](const xl_export::Piece& piece) { std::cout << piece.text; return true; });
//
// Its sources are in src. They need ONNX Runtime's C header (third_party/onnxruntime) and its library, and
// nothing else. docs/guides/cpp.md shows a program in five minutes.
#ifndef XL_EXPORT_HPP
#define XL_EXPORT_HPP

#include "include/xl_export/check.hpp"
#include "include/xl_export/error.hpp"
#include "include/xl_export/generate.hpp"
#include "include/xl_export/memory.hpp"
#include "include/xl_export/sampler.hpp"
#include "include/xl_export/session.hpp"
#include "include/xl_export/spec.hpp"
#include "include/xl_export/streams.hpp"
#include "include/xl_export/vocabulary.hpp"

#endif
