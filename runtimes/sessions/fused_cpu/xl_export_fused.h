/* The fused operator in a program, without a library to load at run time: link the CMake target xl_export_fused. */
#ifndef XL_EXPORT_FUSED_H
#define XL_EXPORT_FUSED_H

#ifdef __cplusplus
extern "C" {
#endif

/* From onnxruntime_c_api.h, of whatever release the program uses. */
typedef struct OrtApiBase OrtApiBase;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtStatus OrtStatus;

/* The variant that this processor runs, such as "avx2" or "dotprod"; NULL if it runs none. */
const char* xl_export_fused_variant(void);

/* Adds the operators to the options of a session. base: what OrtGetApiBase() returns. NULL, or a status as other functions
 * of ONNX Runtime return it. */
OrtStatus* xl_export_fused_register(OrtSessionOptions* options, const OrtApiBase* base);

#ifdef __cplusplus
}
#endif

#endif
