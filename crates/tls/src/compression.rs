//! Compressed certificates (RFC 8879): `ssl_certificate_compression`.
//!
//! Chains are compressed when a configuration is read, never during a handshake. The library looks up the compressed
//! form by the message it would send; an unknown message is sent uncompressed.

use std::collections::HashMap;
use std::io::Write;
use std::sync::{Arc, LazyLock};

use aws_lc_rs::digest::{SHA256, digest};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use parking_lot::Mutex;
use rustls::CertificateCompressionAlgorithm;
use rustls::compress::{CertCompressor, CompressionFailed, CompressionLevel};
use rustls::pki_types::CertificateDer;

/// A compressed chain, cached while a reference to it exists.
pub(super) type Compressed = Arc<[u8]>;

/// Compressed chains, by digest of the uncompressed message.
static KNOWN: LazyLock<Mutex<HashMap<[u8; 32], Compressed>>> = LazyLock::new(Mutex::default);

/// Compressor for the library that only returns prepared results.
pub(super) static PREPARED: &Prepared = &Prepared;

#[derive(Debug)]
pub(super) struct Prepared;

impl CertCompressor for Prepared {
    fn compress(&self, input: Vec<u8>, _: CompressionLevel) -> Result<Vec<u8>, CompressionFailed> {
        KNOWN.lock().get(&name_of(&input)).map(|compressed| compressed.to_vec()).ok_or(CompressionFailed)
    }

    fn algorithm(&self) -> CertificateCompressionAlgorithm {
        CertificateCompressionAlgorithm::Zlib
    }
}

fn name_of(message: &[u8]) -> [u8; 32] {
    digest(&SHA256, message).as_ref().try_into().expect("a digest's length")
}

/// Compresses a chain; `None` if that does not make it shorter.
pub(super) fn compress(chain: &[CertificateDer<'_>]) -> Option<Compressed> {
    let message = message_of(chain);
    let name = name_of(&message);
    if let Some(known) = KNOWN.lock().get(&name) {
        return Some(Arc::clone(known));
    }
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(&message).ok()?;
    let compressed: Compressed = encoder.finish().ok().filter(|compressed| compressed.len() < message.len())?.into();
    let mut known = KNOWN.lock();
    // Entries that no configuration references are evicted.
    known.retain(|_, compressed| Arc::strong_count(compressed) > 1);
    known.insert(name, Arc::clone(&compressed));
    Some(compressed)
}

/// The TLSv1.3 Certificate message without its header (RFC 8446, section 4.4.2), with no context and no extensions.
fn message_of(chain: &[CertificateDer<'_>]) -> Vec<u8> {
    let length = |bytes: usize| [(bytes >> 16) as u8, (bytes >> 8) as u8, bytes as u8];
    let entries: Vec<u8> =
        chain.iter().flat_map(|certificate| [&length(certificate.len())[..], certificate, &[0, 0]].concat()).collect();
    [&[0][..], &length(entries.len()), &entries].concat()
}
