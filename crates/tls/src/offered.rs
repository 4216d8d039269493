//! Offer of a client's first message, as text: `$ssl_ciphers`, `$ssl_curves`, `$ssl_sigalgs`, and the JA4 fingerprint.
//!
//! Names are OpenSSL's; numbers without a name are written in hexadecimal digits, as in nginx.

use std::fmt::Write;

use aws_lc_rs::digest::{SHA256, digest};
use gale_protocol::client_hello::{ALPN, ClientHello, SERVER_NAME};

/// Variables of this file. If a configuration mentions one, connections keep the first message.
pub const VARIABLES: [&str; 4] = ["ssl_ciphers", "ssl_curves", "ssl_sigalgs", "ssl_ja4"];

/// OpenSSL's names of cipher suites (`openssl ciphers -V ALL:COMPLEMENTOFALL`), by number
/// (<https://www.iana.org/assignments/tls-parameters/>).
static CIPHERS: &[(u16, &str)] = &[
    (0x0001, "NULL-MD5"),
    (0x0002, "NULL-SHA"),
    (0x002c, "PSK-NULL-SHA"),
    (0x002d, "DHE-PSK-NULL-SHA"),
    (0x002e, "RSA-PSK-NULL-SHA"),
    (0x002f, "AES128-SHA"),
    (0x0032, "DHE-DSS-AES128-SHA"),
    (0x0033, "DHE-RSA-AES128-SHA"),
    (0x0034, "ADH-AES128-SHA"),
    (0x0035, "AES256-SHA"),
    (0x0038, "DHE-DSS-AES256-SHA"),
    (0x0039, "DHE-RSA-AES256-SHA"),
    (0x003a, "ADH-AES256-SHA"),
    (0x003b, "NULL-SHA256"),
    (0x003c, "AES128-SHA256"),
    (0x003d, "AES256-SHA256"),
    (0x0040, "DHE-DSS-AES128-SHA256"),
    (0x0041, "CAMELLIA128-SHA"),
    (0x0044, "DHE-DSS-CAMELLIA128-SHA"),
    (0x0045, "DHE-RSA-CAMELLIA128-SHA"),
    (0x0046, "ADH-CAMELLIA128-SHA"),
    (0x0067, "DHE-RSA-AES128-SHA256"),
    (0x006a, "DHE-DSS-AES256-SHA256"),
    (0x006b, "DHE-RSA-AES256-SHA256"),
    (0x006c, "ADH-AES128-SHA256"),
    (0x006d, "ADH-AES256-SHA256"),
    (0x0084, "CAMELLIA256-SHA"),
    (0x0087, "DHE-DSS-CAMELLIA256-SHA"),
    (0x0088, "DHE-RSA-CAMELLIA256-SHA"),
    (0x0089, "ADH-CAMELLIA256-SHA"),
    (0x008c, "PSK-AES128-CBC-SHA"),
    (0x008d, "PSK-AES256-CBC-SHA"),
    (0x0090, "DHE-PSK-AES128-CBC-SHA"),
    (0x0091, "DHE-PSK-AES256-CBC-SHA"),
    (0x0094, "RSA-PSK-AES128-CBC-SHA"),
    (0x0095, "RSA-PSK-AES256-CBC-SHA"),
    (0x009c, "AES128-GCM-SHA256"),
    (0x009d, "AES256-GCM-SHA384"),
    (0x009e, "DHE-RSA-AES128-GCM-SHA256"),
    (0x009f, "DHE-RSA-AES256-GCM-SHA384"),
    (0x00a2, "DHE-DSS-AES128-GCM-SHA256"),
    (0x00a3, "DHE-DSS-AES256-GCM-SHA384"),
    (0x00a6, "ADH-AES128-GCM-SHA256"),
    (0x00a7, "ADH-AES256-GCM-SHA384"),
    (0x00a8, "PSK-AES128-GCM-SHA256"),
    (0x00a9, "PSK-AES256-GCM-SHA384"),
    (0x00aa, "DHE-PSK-AES128-GCM-SHA256"),
    (0x00ab, "DHE-PSK-AES256-GCM-SHA384"),
    (0x00ac, "RSA-PSK-AES128-GCM-SHA256"),
    (0x00ad, "RSA-PSK-AES256-GCM-SHA384"),
    (0x00ae, "PSK-AES128-CBC-SHA256"),
    (0x00af, "PSK-AES256-CBC-SHA384"),
    (0x00b0, "PSK-NULL-SHA256"),
    (0x00b1, "PSK-NULL-SHA384"),
    (0x00b2, "DHE-PSK-AES128-CBC-SHA256"),
    (0x00b3, "DHE-PSK-AES256-CBC-SHA384"),
    (0x00b4, "DHE-PSK-NULL-SHA256"),
    (0x00b5, "DHE-PSK-NULL-SHA384"),
    (0x00b6, "RSA-PSK-AES128-CBC-SHA256"),
    (0x00b7, "RSA-PSK-AES256-CBC-SHA384"),
    (0x00b8, "RSA-PSK-NULL-SHA256"),
    (0x00b9, "RSA-PSK-NULL-SHA384"),
    (0x00ba, "CAMELLIA128-SHA256"),
    (0x00bd, "DHE-DSS-CAMELLIA128-SHA256"),
    (0x00be, "DHE-RSA-CAMELLIA128-SHA256"),
    (0x00bf, "ADH-CAMELLIA128-SHA256"),
    (0x00c0, "CAMELLIA256-SHA256"),
    (0x00c3, "DHE-DSS-CAMELLIA256-SHA256"),
    (0x00c4, "DHE-RSA-CAMELLIA256-SHA256"),
    (0x00c5, "ADH-CAMELLIA256-SHA256"),
    (0x1301, "TLS_AES_128_GCM_SHA256"),
    (0x1302, "TLS_AES_256_GCM_SHA384"),
    (0x1303, "TLS_CHACHA20_POLY1305_SHA256"),
    (0xc006, "ECDHE-ECDSA-NULL-SHA"),
    (0xc009, "ECDHE-ECDSA-AES128-SHA"),
    (0xc00a, "ECDHE-ECDSA-AES256-SHA"),
    (0xc010, "ECDHE-RSA-NULL-SHA"),
    (0xc013, "ECDHE-RSA-AES128-SHA"),
    (0xc014, "ECDHE-RSA-AES256-SHA"),
    (0xc015, "AECDH-NULL-SHA"),
    (0xc018, "AECDH-AES128-SHA"),
    (0xc019, "AECDH-AES256-SHA"),
    (0xc01d, "SRP-AES-128-CBC-SHA"),
    (0xc01e, "SRP-RSA-AES-128-CBC-SHA"),
    (0xc01f, "SRP-DSS-AES-128-CBC-SHA"),
    (0xc020, "SRP-AES-256-CBC-SHA"),
    (0xc021, "SRP-RSA-AES-256-CBC-SHA"),
    (0xc022, "SRP-DSS-AES-256-CBC-SHA"),
    (0xc023, "ECDHE-ECDSA-AES128-SHA256"),
    (0xc024, "ECDHE-ECDSA-AES256-SHA384"),
    (0xc027, "ECDHE-RSA-AES128-SHA256"),
    (0xc028, "ECDHE-RSA-AES256-SHA384"),
    (0xc02b, "ECDHE-ECDSA-AES128-GCM-SHA256"),
    (0xc02c, "ECDHE-ECDSA-AES256-GCM-SHA384"),
    (0xc02f, "ECDHE-RSA-AES128-GCM-SHA256"),
    (0xc030, "ECDHE-RSA-AES256-GCM-SHA384"),
    (0xc035, "ECDHE-PSK-AES128-CBC-SHA"),
    (0xc036, "ECDHE-PSK-AES256-CBC-SHA"),
    (0xc037, "ECDHE-PSK-AES128-CBC-SHA256"),
    (0xc038, "ECDHE-PSK-AES256-CBC-SHA384"),
    (0xc039, "ECDHE-PSK-NULL-SHA"),
    (0xc03a, "ECDHE-PSK-NULL-SHA256"),
    (0xc03b, "ECDHE-PSK-NULL-SHA384"),
    (0xc050, "ARIA128-GCM-SHA256"),
    (0xc051, "ARIA256-GCM-SHA384"),
    (0xc052, "DHE-RSA-ARIA128-GCM-SHA256"),
    (0xc053, "DHE-RSA-ARIA256-GCM-SHA384"),
    (0xc056, "DHE-DSS-ARIA128-GCM-SHA256"),
    (0xc057, "DHE-DSS-ARIA256-GCM-SHA384"),
    (0xc05c, "ECDHE-ECDSA-ARIA128-GCM-SHA256"),
    (0xc05d, "ECDHE-ECDSA-ARIA256-GCM-SHA384"),
    (0xc060, "ECDHE-ARIA128-GCM-SHA256"),
    (0xc061, "ECDHE-ARIA256-GCM-SHA384"),
    (0xc06a, "PSK-ARIA128-GCM-SHA256"),
    (0xc06b, "PSK-ARIA256-GCM-SHA384"),
    (0xc06c, "DHE-PSK-ARIA128-GCM-SHA256"),
    (0xc06d, "DHE-PSK-ARIA256-GCM-SHA384"),
    (0xc06e, "RSA-PSK-ARIA128-GCM-SHA256"),
    (0xc06f, "RSA-PSK-ARIA256-GCM-SHA384"),
    (0xc072, "ECDHE-ECDSA-CAMELLIA128-SHA256"),
    (0xc073, "ECDHE-ECDSA-CAMELLIA256-SHA384"),
    (0xc076, "ECDHE-RSA-CAMELLIA128-SHA256"),
    (0xc077, "ECDHE-RSA-CAMELLIA256-SHA384"),
    (0xc094, "PSK-CAMELLIA128-SHA256"),
    (0xc095, "PSK-CAMELLIA256-SHA384"),
    (0xc096, "DHE-PSK-CAMELLIA128-SHA256"),
    (0xc097, "DHE-PSK-CAMELLIA256-SHA384"),
    (0xc098, "RSA-PSK-CAMELLIA128-SHA256"),
    (0xc099, "RSA-PSK-CAMELLIA256-SHA384"),
    (0xc09a, "ECDHE-PSK-CAMELLIA128-SHA256"),
    (0xc09b, "ECDHE-PSK-CAMELLIA256-SHA384"),
    (0xc09c, "AES128-CCM"),
    (0xc09d, "AES256-CCM"),
    (0xc09e, "DHE-RSA-AES128-CCM"),
    (0xc09f, "DHE-RSA-AES256-CCM"),
    (0xc0a0, "AES128-CCM8"),
    (0xc0a1, "AES256-CCM8"),
    (0xc0a2, "DHE-RSA-AES128-CCM8"),
    (0xc0a3, "DHE-RSA-AES256-CCM8"),
    (0xc0a4, "PSK-AES128-CCM"),
    (0xc0a5, "PSK-AES256-CCM"),
    (0xc0a6, "DHE-PSK-AES128-CCM"),
    (0xc0a7, "DHE-PSK-AES256-CCM"),
    (0xc0a8, "PSK-AES128-CCM8"),
    (0xc0a9, "PSK-AES256-CCM8"),
    (0xc0aa, "DHE-PSK-AES128-CCM8"),
    (0xc0ab, "DHE-PSK-AES256-CCM8"),
    (0xc0ac, "ECDHE-ECDSA-AES128-CCM"),
    (0xc0ad, "ECDHE-ECDSA-AES256-CCM"),
    (0xc0ae, "ECDHE-ECDSA-AES128-CCM8"),
    (0xc0af, "ECDHE-ECDSA-AES256-CCM8"),
    (0xcca8, "ECDHE-RSA-CHACHA20-POLY1305"),
    (0xcca9, "ECDHE-ECDSA-CHACHA20-POLY1305"),
    (0xccaa, "DHE-RSA-CHACHA20-POLY1305"),
    (0xccab, "PSK-CHACHA20-POLY1305"),
    (0xccac, "ECDHE-PSK-CHACHA20-POLY1305"),
    (0xccad, "DHE-PSK-CHACHA20-POLY1305"),
    (0xccae, "RSA-PSK-CHACHA20-POLY1305"),
];

/// OpenSSL's names of groups, by number.
static GROUPS: &[(u16, &str)] = &[
    (0x0015, "secp224r1"),
    (0x0016, "secp256k1"),
    (0x0017, "prime256v1"),
    (0x0018, "secp384r1"),
    (0x0019, "secp521r1"),
    (0x001a, "brainpoolP256r1"),
    (0x001b, "brainpoolP384r1"),
    (0x001c, "brainpoolP512r1"),
    (0x001d, "X25519"),
    (0x001e, "X448"),
    (0x0100, "ffdhe2048"),
    (0x0101, "ffdhe3072"),
    (0x0102, "ffdhe4096"),
    (0x0103, "ffdhe6144"),
    (0x0104, "ffdhe8192"),
    (0x0200, "MLKEM512"),
    (0x0201, "MLKEM768"),
    (0x0202, "MLKEM1024"),
    (0x11eb, "SecP256r1MLKEM768"),
    (0x11ec, "X25519MLKEM768"),
    (0x11ed, "SecP384r1MLKEM1024"),
];

/// OpenSSL's names of signature schemes (RFC 8446, section 4.2.3), by number.
static SIGNATURE_SCHEMES: &[(u16, &str)] = &[
    (0x0201, "rsa_pkcs1_sha1"),
    (0x0203, "ecdsa_sha1"),
    (0x0401, "rsa_pkcs1_sha256"),
    (0x0403, "ecdsa_secp256r1_sha256"),
    (0x0501, "rsa_pkcs1_sha384"),
    (0x0503, "ecdsa_secp384r1_sha384"),
    (0x0601, "rsa_pkcs1_sha512"),
    (0x0603, "ecdsa_secp521r1_sha512"),
    (0x0804, "rsa_pss_rsae_sha256"),
    (0x0805, "rsa_pss_rsae_sha384"),
    (0x0806, "rsa_pss_rsae_sha512"),
    (0x0807, "ed25519"),
    (0x0808, "ed448"),
    (0x0809, "rsa_pss_pss_sha256"),
    (0x080a, "rsa_pss_pss_sha384"),
    (0x080b, "rsa_pss_pss_sha512"),
    (0x0904, "mldsa44"),
    (0x0905, "mldsa65"),
    (0x0906, "mldsa87"),
];

/// JA4's names of TLS versions, newest first.
const VERSIONS: &[(u16, &str)] = &[(0x304, "13"), (0x303, "12"), (0x302, "11"), (0x301, "10"), (0x300, "s3")];

/// JA4's placeholder for the digest of an empty list.
const NOTHING: &str = "000000000000";

/// `$ssl_ciphers`
pub fn ciphers(hello: &ClientHello<'_>) -> String {
    names(hello.cipher_suites(), CIPHERS)
}

/// `$ssl_curves`
pub fn curves(hello: &ClientHello<'_>) -> String {
    names(hello.groups(), GROUPS)
}

/// `$ssl_sigalgs`
pub fn signature_schemes(hello: &ClientHello<'_>) -> String {
    names(hello.signature_schemes(), SIGNATURE_SCHEMES)
}

fn names(numbers: impl Iterator<Item = u16>, known: &[(u16, &str)]) -> String {
    let mut text = String::new();
    for number in numbers {
        if !text.is_empty() {
            text.push(':');
        }
        match known.binary_search_by_key(&number, |(own, _)| *own) {
            Ok(place) => text.push_str(known[place].1),
            Err(_) => {
                // Writing to a string cannot fail.
                let _ = write!(text, "0x{number:04x}");
            }
        }
    }
    text
}

/// `$ssl_ja4`: JA4 fingerprint of a client over TCP
/// (<https://github.com/FoxIO-LLC/ja4/blob/main/technical_details/JA4.md>).
pub fn ja4(hello: &ClientHello<'_>) -> String {
    let is_real = |number: &u16| !is_grease(*number);
    let mut ciphers: Vec<u16> = hello.cipher_suites().filter(is_real).collect();
    let mut extensions: Vec<u16> = hello.extension_types().filter(is_real).collect();
    let newest = hello.versions().filter(is_real).max();
    let version = VERSIONS.iter().find(|(number, _)| Some(*number) == newest).map_or("00", |(_, name)| name);
    let name = if extensions.contains(&SERVER_NAME) { 'd' } else { 'i' };
    let (ciphers_count, extensions_count) = (ciphers.len().min(99), extensions.len().min(99));
    let alpn = ja4_alpn(hello.alpn_protocols().next().unwrap_or_default());
    ciphers.sort_unstable();
    extensions.retain(|kind| ![SERVER_NAME, ALPN].contains(kind));
    extensions.sort_unstable();
    let mut offers = listed(extensions.iter().copied());
    let schemes = listed(hello.signature_schemes().filter(is_real));
    if !schemes.is_empty() {
        offers = format!("{offers}_{schemes}");
    }
    let ciphers = shortened(&listed(ciphers.iter().copied()));
    let offers = if extensions.is_empty() { NOTHING.to_owned() } else { shortened(&offers) };
    format!("t{version}{name}{ciphers_count:02}{extensions_count:02}{alpn}_{ciphers}_{offers}")
}

/// `true` for GREASE values, which clients send to keep servers tolerant of unknown numbers (RFC 8701).
fn is_grease(number: u16) -> bool {
    number & 0x0f0f == 0x0a0a && number >> 8 == number & 0xff
}

/// JA4's form of a protocol name: its first and last character.
fn ja4_alpn(name: &[u8]) -> String {
    let (Some(&first), Some(&last)) = (name.first(), name.last()) else { return "00".to_owned() };
    if first.is_ascii_alphanumeric() && last.is_ascii_alphanumeric() {
        return [char::from(first), char::from(last)].iter().collect();
    }
    format!("{:x}{:x}", first >> 4, last & 0xf)
}

fn listed(numbers: impl Iterator<Item = u16>) -> String {
    numbers.map(|number| format!("{number:04x}")).collect::<Vec<_>>().join(",")
}

/// The first 12 hexadecimal digits of the SHA-256 digest.
fn shortened(text: &str) -> String {
    match text {
        "" => NOTHING.to_owned(),
        text => digest(&SHA256, text.as_bytes()).as_ref()[..6].iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

#[cfg(test)]
mod tests {
    use gale_protocol::client_hello::{Status, parse};

    use super::*;

    fn sized<const N: usize>(content: &[u8]) -> Vec<u8> {
        [&(content.len() as u32).to_be_bytes()[4 - N..], content].concat()
    }

    /// A client's first message with these suites and extensions.
    fn hello(suites: &[u16], extensions: &[(u16, Vec<u8>)]) -> ClientHello<'static> {
        let suites: Vec<u8> = suites.iter().flat_map(|suite| suite.to_be_bytes()).collect();
        let extension = |(kind, content): &(u16, Vec<u8>)| [&kind.to_be_bytes()[..], &sized::<2>(content)].concat();
        let extensions: Vec<u8> = extensions.iter().flat_map(extension).collect();
        let body = [&[3, 3][..], &[0; 32], &[0], &sized::<2>(&suites), &[1, 0], &sized::<2>(&extensions)].concat();
        let record = [&[22, 3, 1][..], &sized::<2>(&[&[1][..], &sized::<3>(&body)].concat())].concat();
        match parse(&record) {
            Status::Complete(hello) => hello.into_owned(),
            other => panic!("{other:?}"),
        }
    }

    fn numbers(numbers: &[u16]) -> Vec<u8> {
        sized::<2>(&numbers.iter().flat_map(|number| number.to_be_bytes()).collect::<Vec<_>>())
    }

    #[test]
    fn tables_are_in_order() {
        for table in [CIPHERS, GROUPS, SIGNATURE_SCHEMES] {
            assert!(table.is_sorted_by(|one, next| one.0 < next.0));
        }
    }

    #[test]
    fn ja4_is_that_of_its_description() {
        // Chrome's message, the example in the description.
        let suites = [
            0x2a2a, 0x1301, 0x1302, 0x1303, 0xc02b, 0xc02f, 0xc02c, 0xc030, 0xcca9, 0xcca8, 0xc013, 0xc014, 0x009c,
            0x009d, 0x002f, 0x0035,
        ];
        let schemes = numbers(&[0x0403, 0x0804, 0x0401, 0x0503, 0x0805, 0x0501, 0x0806, 0x0601]);
        let protocols = sized::<2>(&[sized::<1>(b"h2"), sized::<1>(b"http/1.1")].concat());
        let mut extensions = vec![(0x1a1a, vec![]), (0x0010, protocols), (0x000d, schemes)];
        extensions.push((0x002b, sized::<1>(&[0x7a, 0x7a, 3, 4, 3, 3])));
        for kind in [0x001b, 0x0000, 0x0033, 0x4469, 0x0017, 0x002d, 0x0005, 0x0023, 0x0012, 0xff01, 0x000b, 0x000a] {
            extensions.push((kind, vec![]));
        }
        extensions.push((0x0015, vec![0; 5]));
        assert_eq!(ja4(&hello(&suites, &extensions)), "t13d1516h2_8daaf6152771_e5627efa2ab1");
        assert_eq!(ja4(&hello(&[], &[])), "t12i0000 00_000000000000_000000000000".replace(' ', ""));
        assert_eq!([ja4_alpn(b"http/1.1"), ja4_alpn(&[0xab, 0xcd]), ja4_alpn(b"h")], ["h1", "ad", "hh"]);
    }

    #[test]
    fn names_are_openssl_s_and_the_rest_is_in_digits() {
        let hello = hello(
            &[0x1a1a, 0x1301, 0xc02f, 0x00ff],
            &[(10, numbers(&[0x11ec, 29, 23, 0xfafa])), (13, numbers(&[0x0403, 0x0999]))],
        );
        assert_eq!(ciphers(&hello), "0x1a1a:TLS_AES_128_GCM_SHA256:ECDHE-RSA-AES128-GCM-SHA256:0x00ff");
        assert_eq!(curves(&hello), "X25519MLKEM768:X25519:prime256v1:0xfafa");
        assert_eq!(signature_schemes(&hello), "ecdsa_secp256r1_sha256:0x0999");
    }
}
