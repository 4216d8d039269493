//! Chunked bodies: decoding at once and byte by byte give the same result, which survives a round trip.

use gale_protocol::Offence;
use gale_protocol::http1::{ChunkLimits, ChunkedDecoder, Trailers, response};

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let limits = ChunkLimits { extensions_max: 64, trailers_max: 64 };
    let whole = decode(&mut std::iter::once(data), limits);
    assert_eq!(whole, decode(&mut data.chunks(1), limits));
    let Ok((body, _, trailers)) = whole else { return };
    for (name, value) in &trailers.fields {
        assert!(!name.is_empty() && value.of(&trailers.text).trim_ascii() == value.of(&trailers.text));
    }
    let mut written = Vec::new();
    for piece in body.chunks(7) {
        response::write_chunk(&mut written, piece);
    }
    written.extend_from_slice(response::LAST_CHUNK);
    assert_eq!(decode(&mut written.chunks(3), limits), Ok((body, Some(written.len()), Trailers::default())));
}

/// Returns the data, the length of the encoded body if it ended, and its trailers.
fn decode(
    pieces: &mut dyn Iterator<Item = &[u8]>,
    limits: ChunkLimits,
) -> Result<(Vec<u8>, Option<usize>, Trailers), Offence> {
    let mut decoder = ChunkedDecoder::new(limits);
    let (mut body, mut total) = (Vec::new(), 0);
    for piece in pieces {
        let mut rest = piece;
        while !rest.is_empty() {
            let decoded = decoder.decode(rest)?;
            if let Some(range) = decoded.data {
                body.extend_from_slice(&rest[range]);
            }
            total += decoded.consumed;
            if decoded.finished {
                return Ok((body, Some(total), decoder.take_trailers()));
            }
            assert!(decoded.consumed > 0);
            rest = &rest[decoded.consumed..];
        }
    }
    Ok((body, None, Trailers::default()))
}
