//! TLS client hello: parsing at once and byte by byte give the same result, and no accessor leaves the bounds of the
//! message.

use gale_tls::offered;
use gale_protocol::client_hello::{ClientHello, Status, host_of, parse};

/// For example `t13d1516h2_8daaf6152771_e5627efa2ab1`.
const JA4_LENGTH: usize = 36;

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let whole = parse(data);
    let decided = (0..=data.len()).map(|length| parse(&data[..length])).find(|status| *status != Status::NeedMore);
    assert_eq!(decided.unwrap_or(Status::NeedMore), whole);
    if let Status::Complete(hello) = whole {
        check(&hello, data.len());
        check(&hello.into_owned(), data.len());
    }
}

fn check(hello: &ClientHello<'_>, length_max: usize) {
    let name = hello.server_name().unwrap_or_default();
    assert!(name.len() <= length_max && host_of(name).len() <= name.len());
    let names: usize = hello.alpn_protocols().map(|name| name.len() + 1).sum();
    assert!(names <= length_max && hello.alpn_protocols().all(|name| !name.is_empty()));
    let numbers = [
        hello.cipher_suites().count(),
        hello.groups().count(),
        hello.signature_schemes().count(),
        hello.extension_types().count(),
    ];
    assert!(numbers.iter().all(|count| count * 2 <= length_max));
    if let Some(version) = hello.version_before_tls12() {
        assert!(version < 0x0303 && hello.versions().eq([version]) && hello.version() == version);
    }
    for text in [offered::ciphers(hello), offered::curves(hello), offered::signature_schemes(hello)] {
        assert!(text.len() <= length_max * 32 && text.is_ascii());
    }
    let ja4 = offered::ja4(hello);
    assert!(ja4.len() == JA4_LENGTH && ja4.is_ascii() && ja4.starts_with('t'), "{ja4}");
}
