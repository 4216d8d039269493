//! memcached: writing of keys, valid and invalid replies, and the same result however the input is split.

use gale_protocol::http1::Status;
use gale_protocol::memcached::{MemcachedFault, MemcachedFaultKind, Reply, ReplyParser, ValueDecoder, write_get};
use proptest::prelude::*;

fn request(key: &[u8]) -> Vec<u8> {
    let mut out = b"before".to_vec();
    let length = write_get(&mut out, key);
    assert_eq!(out.len(), b"before".len() + b"get ".len() + length + b"\r\n".len());
    out.split_off(b"before".len())
}

#[test]
fn keys_are_escaped_as_nginx_does() {
    assert_eq!(request(b"/a?b=c&d"), b"get /a?b=c&d\r\n");
    assert_eq!(request(b"a b%c\r\nset x\0\x1f"), b"get a%20b%25c%0D%0Aset%20x%00%1F\r\n");
    assert_eq!(request(b"\x7f\xe9"), b"get \x7f\xe9\r\n");
}

/// Parses the input at once and byte by byte.
fn parse(input: &[u8], key: &[u8], line_max: usize) -> Result<(Status, Reply), MemcachedFault> {
    let mut reply = Reply::default();
    let result = ReplyParser::new(line_max).parse(input, key, &mut reply);
    let (mut parser, mut other) = (ReplyParser::new(line_max), Reply::default());
    let mut pieces = (0..=input.len()).map(|end| parser.parse(&input[..end], key, &mut other));
    let pieces = pieces.find(|result| *result != Ok(Status::NeedMore)).unwrap_or(Ok(Status::NeedMore));
    assert_eq!((result, reply), (pieces, other), "{:?}", String::from_utf8_lossy(input));
    result.map(|status| (status, reply))
}

#[test]
fn replies_are_understood() {
    let complete = |input: &[u8]| match parse(input, b"key", 4096) {
        Ok((Status::Complete { consumed }, reply)) => (consumed, reply),
        result => panic!("{result:?}"),
    };
    assert_eq!(complete(b"VALUE key 0 8\r\nSEE-"), (15, Reply::Found { flags: Some(0), length: 8 }));
    assert_eq!(complete(b"VALUE key 4294967295 0\r\n"), (24, Reply::Found { flags: Some(4294967295), length: 0 }));
    assert_eq!(complete(b"VALUE key x 1\r\n"), (15, Reply::Found { flags: None, length: 1 }));
    assert_eq!(complete(b"END\r\nmore"), (5, Reply::NotFound));
    for input in [&b""[..], b"V", b"VALUE key 0 8\r", b"END", b"garbage"] {
        assert_eq!(parse(input, b"key", 4096), Ok((Status::NeedMore, Reply::NotFound)));
    }
}

#[test]
fn wrong_replies_are_refused_with_nginx_words() {
    let in_response =
        |what: &str, line: &str| format!("memcached sent invalid {what} in response \"{line}\" for key \"key\"");
    for (line, message) in [
        ("", "memcached sent invalid response: \"\"".to_string()),
        ("ERROR", "memcached sent invalid response: \"ERROR\"".to_string()),
        ("SERVER_ERROR out", "memcached sent invalid response: \"SERVER_ERROR out\"".to_string()),
        ("END ", "memcached sent invalid response: \"END \"".to_string()),
        ("VALUE key", "memcached sent invalid response: \"VALUE key\"".to_string()),
        ("VALUE keys 0 1", "memcached sent invalid response: \"VALUE keys 0 1\"".to_string()),
        ("VALUE key 0", "memcached sent invalid response: \"VALUE key 0\"".to_string()),
        ("VALUE ke 0 1", in_response("key", "VALUE ke 0 1")),
        ("VALUE key 0 ", in_response("length", "VALUE key 0 ")),
        ("VALUE key 0 -1", in_response("length", "VALUE key 0 -1")),
        ("VALUE key 0 1 2", in_response("length", "VALUE key 0 1 2")),
        ("VALUE key 0 9223372036854775808", in_response("length", "VALUE key 0 9223372036854775808")),
    ] {
        let input = format!("{line}\r\n");
        let fault = parse(input.as_bytes(), b"key", 4096).unwrap_err();
        let mut out = Vec::new();
        fault.write_to(input.as_bytes(), b"key", &mut out);
        assert_eq!(String::from_utf8(out).unwrap(), message);
    }
    assert_eq!(parse(b"END\n", b"key", 4096).unwrap_err().kind, MemcachedFaultKind::InvalidResponse);
    assert_eq!(parse(b"\n", b"key", 4096).unwrap_err().kind, MemcachedFaultKind::InvalidResponse);
}

#[test]
fn lines_are_bounded() {
    let line = b"VALUE key 0 8\r\n";
    assert!(matches!(parse(line, b"key", line.len()), Ok((Status::Complete { .. }, _))));
    for line_max in 0..line.len() {
        let fault = parse(line, b"key", line_max).unwrap_err();
        assert_eq!(fault.kind.to_string(), "upstream sent too big header");
    }
}

/// Returns the value, and the number of bytes consumed if it ended.
fn decode(
    length: u64,
    pieces: &mut dyn Iterator<Item = &[u8]>,
) -> (Vec<u8>, Result<Option<usize>, MemcachedFaultKind>) {
    let (mut decoder, mut value, mut total) = (ValueDecoder::new(length), Vec::new(), 0);
    for mut rest in pieces {
        while !rest.is_empty() {
            let decoded = match decoder.decode(rest) {
                Ok(decoded) => decoded,
                Err(fault) => return (value, Err(fault.kind)),
            };
            value.extend_from_slice(decoded.data.map_or(&[], |range| &rest[range]));
            assert_eq!(decoder.remaining(), length - value.len() as u64);
            total += decoded.consumed;
            assert_eq!(decoded.finished, decoder.is_finished());
            if decoded.finished {
                return (value, Ok(Some(total)));
            }
            assert!(decoded.consumed > 0);
            rest = &rest[decoded.consumed..];
        }
    }
    (value, Ok(None))
}

#[test]
fn values_end_with_their_trailer() {
    let whole = |length, input: &[u8]| {
        let result = decode(length, &mut std::iter::once(input));
        assert_eq!(result, decode(length, &mut input.chunks(1)));
        result
    };
    assert_eq!(whole(8, b"SEE-THIS\r\nEND\r\n"), (b"SEE-THIS".to_vec(), Ok(Some(15))));
    assert_eq!(whole(0, b"\r\nEND\r\nmore"), (vec![], Ok(Some(7))));
    assert_eq!(whole(5, b"\r\nEND\r\nEND\r\n"), (b"\r\nEND".to_vec(), Ok(Some(12))));
    for end in 0..15 {
        assert_eq!(whole(8, &b"SEE-THIS\r\nEND\r\n"[..end]).1, Ok(None));
    }
    for input in ["SEE-THIS-MORE", "SEE-THIS\nEND\r\n", "SEE-THIS\r\nEND\n", "SEE-THIS\r\nVALUE a 0 1\r\n"] {
        assert_eq!(whole(8, input.as_bytes()), (b"SEE-THIS".to_vec(), Err(MemcachedFaultKind::InvalidTrailer)));
    }
}

proptest! {
    #[test]
    fn requests_are_one_line_with_one_key(key in prop::collection::vec(any::<u8>(), 1..80)) {
        let out = request(&key);
        let escaped = out.strip_prefix(b"get ").and_then(|rest| rest.strip_suffix(b"\r\n")).unwrap();
        prop_assert!(!escaped.iter().any(|&byte| byte <= b' '));
        let reply = [b"VALUE ", escaped, b" 1 2\r\n"].concat();
        let expected = (Status::Complete { consumed: reply.len() }, Reply::Found { flags: Some(1), length: 2 });
        prop_assert_eq!(parse(&reply, escaped, 4096), Ok(expected));
    }

    #[test]
    fn splitting_makes_no_difference(value in prop::collection::vec(any::<u8>(), 0..50),
                                     trailer in prop_oneof![2 => Just(b"\r\nEND\r\n".to_vec()),
                                                            1 => prop::collection::vec(any::<u8>(), 0..9)],
                                     size in 1..60usize) {
        let input = [&value[..], &trailer].concat();
        let whole = decode(value.len() as u64, &mut std::iter::once(&input[..]));
        prop_assert_eq!(&whole.0, &value);
        prop_assert_eq!(decode(value.len() as u64, &mut input.chunks(size)), whole);
    }
}
