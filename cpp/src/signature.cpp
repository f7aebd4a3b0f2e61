#include "signature.hpp"

#ifdef XL_EXPORT_SIGNATURES
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

#include <memory>
#include <optional>
#endif

#include "include/xl_export/error.hpp"

namespace xl_export::detail {

#ifdef XL_EXPORT_SIGNATURES

namespace {

constexpr std::uint64_t max_key_bytes = 1 << 16, max_signature_bytes = 1 << 10;

template <class T>
using Owned = std::unique_ptr<T, void (*)(T*)>;

// Whether a signature fits; nothing if the text of a key is none.
std::optional<bool> fits(const Bytes& pem, const Bytes& signature, const Bytes& content) {
  const std::unique_ptr<BIO, int (*)(BIO*)> text(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())),
                                                 BIO_free);
  char none[] = "";  // the password of a file that has one, for which OpenSSL would ask at the terminal
  const Owned<EVP_PKEY> key(text ? PEM_read_bio_PUBKEY(text.get(), nullptr, nullptr, none) : nullptr,
                            EVP_PKEY_free);
  if (!key || EVP_PKEY_id(key.get()) != EVP_PKEY_ED25519) return std::nullopt;
  const Owned<EVP_MD_CTX> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  return context && EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
         EVP_DigestVerify(context.get(), signature.data(), signature.size(), content.data(),
                          content.size()) == 1;
}

}  // namespace

void verify_signature(const std::filesystem::path& path, const Bytes& content,
                      const std::string& public_key) {
  std::error_code error;
  const bool given = std::filesystem::is_regular_file(public_key, error);
  const Bytes pem = given ? read_file(public_key, max_key_bytes) : Bytes();
  std::filesystem::path signature = path;
  signature += ".sig";
  if (!std::filesystem::is_regular_file(signature, error))
    throw Error(Fault::artefact, signature.string() +
                                     " is missing, and a public key was given; copy the signature with "
                                     "spec.json, or sign that file with `openssl pkeyutl -sign -rawin`.");
  const Bytes bytes = read_file(signature, max_signature_bytes);
  ERR_set_mark();
  const std::optional<bool> found = fits(pem, bytes, content);
  ERR_pop_to_mark();  // OpenSSL's errors of this thread are those of before
  if (!found)
    throw Error(Fault::option, public_key +
                                   " is no Ed25519 public key in PEM; write one with `openssl pkey -in "
                                   "PRIVATE.pem -pubout -out PUBLIC.pem`.");
  if (!*found)
    throw Error(Fault::artefact, signature.string() + " does not fit spec.json and the public key " +
                                     public_key +
                                     "; copy the whole folder again, or sign it with the private key that "
                                     "belongs to this one.");
}

#else

void verify_signature(const std::filesystem::path&, const Bytes&, const std::string& public_key) {
  throw Error(Fault::option, "the public key " + public_key +
                                 " was given, and this library was built without OpenSSL; build it with "
                                 "-DXL_EXPORT_SIGNATURES=ON.");
}

#endif

}  // namespace xl_export::detail
