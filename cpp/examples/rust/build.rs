//! Links `libxl_export_c.so` from the folder that XL_EXPORT_LIB names, such as CMake's build folder.

fn main() {
    let folder =
        std::env::var("XL_EXPORT_LIB").expect("set XL_EXPORT_LIB to the folder of libxl_export_c.so");
    println!("cargo:rerun-if-env-changed=XL_EXPORT_LIB");
    println!("cargo:rustc-link-search=native={folder}");
    println!("cargo:rustc-link-lib=dylib=xl_export_c");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
}
