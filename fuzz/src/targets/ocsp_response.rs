//! OCSP responses: reading arbitrary bytes never panics, and an accepted status is still valid. Signatures are verified
//! as well, so that certificates in a response are parsed.

use std::sync::LazyLock;

use gale_tls::ocsp::message::{CertificateId, read_response};

const ISSUER: &[u8] = include_bytes!("../../../crates/tls/tests/ocsp/issuer.der");
const GOOD: &[u8] = include_bytes!("../../../crates/tls/tests/ocsp/good.der");

/// A day in 2026.
const NOW: u64 = 1_795_824_000;

static ID: LazyLock<CertificateId> = LazyLock::new(|| CertificateId::of(GOOD, ISSUER).expect("certificates"));

/// Runs the target on one input.
pub fn run(response: &[u8]) {
    for issuer in [None, Some(ISSUER)] {
        if let Ok(told) = read_response(response, &ID, issuer, NOW) {
            // The limit is loose: a clock may be wrong by some minutes.
            assert!(told.valid_until > NOW - 3600);
        }
    }
}
