// Prints the variant of the built-in fused operator that this processor runs.
#include <cstdio>

#include "xl_export_fused.h"

int main() { std::puts(xl_export_fused_variant()); }
