//! The chunked coding: valid and invalid framing, limits, and input split anywhere.

#[path = "shared/requests.rs"]
mod requests;

use gale_protocol::http1::{ChunkLimits, ChunkedDecoder, Trailers, response};
use gale_protocol::{Offence, Range32};
use proptest::prelude::*;

/// Decodes pieces in sequence. Returns the data and the number of bytes consumed, or `None` if the body did not end.
fn decode(pieces: &[&[u8]], limits: ChunkLimits) -> Result<(Vec<u8>, Option<usize>), Offence> {
    let mut decoder = ChunkedDecoder::new(limits);
    let (mut data, mut total) = (Vec::new(), 0);
    for piece in pieces {
        let mut rest = *piece;
        while !rest.is_empty() {
            let decoded = decoder.decode(rest)?;
            if let Some(range) = &decoded.data {
                assert!(!range.is_empty() && range.end == decoded.consumed);
                data.extend_from_slice(&rest[range.clone()]);
            }
            total += decoded.consumed;
            if decoded.finished {
                assert!(decoder.is_finished());
                return Ok((data, Some(total)));
            }
            assert!(decoded.consumed > 0);
            rest = &rest[decoded.consumed..];
        }
    }
    Ok((data, None))
}

fn whole(input: &[u8]) -> Result<(Vec<u8>, Option<usize>), Offence> {
    let result = decode(&[input], ChunkLimits::default());
    let bytes: Vec<&[u8]> = input.chunks(1).collect();
    assert_eq!(result, decode(&bytes, ChunkLimits::default()), "byte by byte: {:?}", String::from_utf8_lossy(input));
    result
}

#[test]
fn right_bodies() {
    for (input, data) in requests::RIGHT_CHUNKS.iter().chain(requests::LENIENT_CHUNKS) {
        let result = whole(input.as_bytes());
        assert_eq!(result, Ok((data.as_bytes().to_vec(), Some(input.len()))), "{input:?}");
        let with_more = format!("{input}GET /");
        assert_eq!(whole(with_more.as_bytes()), Ok((data.as_bytes().to_vec(), Some(input.len()))));
    }
}

/// The trailer fields of a valid body, as text.
fn trailers(pieces: &mut dyn Iterator<Item = &[u8]>) -> Vec<(String, String)> {
    let mut decoder = ChunkedDecoder::default();
    for mut piece in pieces {
        while !piece.is_empty() {
            piece = &piece[decoder.decode(piece).unwrap().consumed..];
        }
    }
    let Trailers { text, fields } = decoder.take_trailers();
    assert_eq!(decoder.take_trailers(), Trailers::default());
    let of = |range: Range32| String::from_utf8(range.of(&text).to_vec()).unwrap();
    fields.into_iter().map(|(name, value)| (of(name), of(value))).collect()
}

#[test]
fn trailer_fields_are_kept_in_their_order_and_spelling() {
    let cases: &[(&str, &[(&str, &str)])] = &[
        ("", &[]),
        ("A:\r\n", &[("A", "")]),
        ("A: \t \r\n", &[("A", "")]),
        (
            "x-SUM:1\r\nContent-Length: \t5 6\t\r\nEmpty:\r\nX-Sum: a:b\r\n",
            &[("x-SUM", "1"), ("Content-Length", "5 6"), ("Empty", ""), ("X-Sum", "a:b")],
        ),
    ];
    for (section, expected) in cases {
        let body = format!("1\r\nx\r\n0\r\n{section}\r\n").into_bytes();
        let expected: Vec<_> = expected.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        assert_eq!(trailers(&mut std::iter::once(&*body)), expected, "{section:?}");
        assert_eq!(trailers(&mut body.chunks(1)), expected, "{section:?}");
    }
}

#[test]
fn half_bodies_do_not_finish() {
    let input = b"5;e\r\nhello\r\n0\r\nT: x\r\n\r\n";
    for end in 0..input.len() {
        let (_, finished) = whole(&input[..end]).unwrap();
        assert_eq!(finished, None, "{end}");
    }
}

#[test]
fn wrong_framing() {
    for input in requests::WRONG_CHUNKS {
        assert_eq!(whole(input.as_bytes()), Err(Offence::InvalidChunk), "{input:?}");
    }
    assert_eq!(whole(b"7fffffffffffffff\r\n"), Ok((vec![], None)));
}

#[test]
fn chunks_of_a_request_have_no_odd_sizes() {
    let outcome = |input: &str| {
        let (mut decoder, mut rest) = (ChunkedDecoder::of_request(), input.as_bytes());
        while !rest.is_empty() {
            rest = &rest[decoder.decode(rest)?.consumed..];
        }
        Ok(decoder.is_finished())
    };
    for (input, _) in requests::RIGHT_CHUNKS {
        assert_eq!(outcome(input), Ok(true), "{input:?}");
    }
    for (input, _) in requests::LENIENT_CHUNKS {
        assert_eq!(outcome(input), Err(Offence::InvalidChunk), "{input:?}");
    }
}

#[test]
fn wrong_trailers() {
    for trailer in requests::WRONG_TRAILERS {
        assert_eq!(whole(format!("0\r\n{trailer}").as_bytes()), Err(Offence::InvalidTrailer), "{trailer:?}");
    }
}

#[test]
fn extensions_and_trailers_are_bounded() {
    let limits = ChunkLimits { extensions_max: 10, trailers_max: 10 };
    let decode = |input: &str| decode(&[input.as_bytes()], limits).map(|(_, finished)| finished.is_some());
    assert_eq!(decode("1;23456789a\r\nx\r\n0\r\n\r\n"), Ok(true));
    assert_eq!(decode("1;23456789ab\r\n"), Err(Offence::ChunkExtensionsTooLarge));
    assert_eq!(decode("1;2345\r\nx\r\n1;2345\r\nx\r\n"), Ok(false));
    assert_eq!(decode("1;2345\r\nx\r\n1;2345\r\nx\r\n1;"), Err(Offence::ChunkExtensionsTooLarge));
    assert_eq!(decode(&format!("1{}", " ".repeat(11))), Err(Offence::ChunkExtensionsTooLarge));
    assert_eq!(decode("0\r\nA: 56\r\n\r\n"), Ok(true));
    assert_eq!(decode("0\r\nA: 56789012"), Err(Offence::TrailersTooLarge));
    assert_eq!(decode("0\r\nA:\r\nB:\r\nC:1"), Err(Offence::TrailersTooLarge));
}

#[test]
fn the_rest_of_a_chunk_is_known() {
    let mut decoder = ChunkedDecoder::default();
    decoder.decode(b"10\r\n").unwrap();
    assert_eq!(decoder.chunk_remaining(), 16);
    decoder.decode(b"01234").unwrap();
    assert_eq!(decoder.chunk_remaining(), 11);
}

#[test]
fn offences_of_chunks_have_nginx_words() {
    for offence in
        [Offence::InvalidChunk, Offence::ChunkExtensionsTooLarge, Offence::InvalidTrailer, Offence::TrailersTooLarge]
    {
        assert_eq!((offence.to_string().as_str(), offence.status()), ("client sent invalid chunked body", 400));
    }
}

proptest! {
    #[test]
    fn written_chunks_are_read_back(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8),
                                    cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8)) {
        let mut body = Vec::new();
        for chunk in &chunks {
            response::write_chunk(&mut body, chunk);
        }
        body.extend_from_slice(response::LAST_CHUNK);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(body.len())).collect();
        cuts.extend([0, body.len()]);
        cuts.sort();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &body[pair[0]..pair[1]]).collect();
        prop_assert_eq!(decode(&pieces, ChunkLimits::default()), Ok((chunks.concat(), Some(body.len()))));
    }

    #[test]
    fn pieces_make_no_difference(
        input in "([0-9a-f]{1,2}[ ;x]{0,2}\r?\n?[a-z]{0,8}(\r\n){0,2}){0,6}(0\r\n)?(A: b\r\n)?(\r\n)?"
    ) {
        let _ = whole(input.as_bytes());
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(input in prop::collection::vec(any::<u8>(), 0..100)) {
        let _ = whole(&input);
    }
}
