//! Request heads: parsing at once, byte by byte and in two pieces give the same result, and no accessor panics.

use gale_protocol::http1::{HeadParser, Limits, Status};
use gale_protocol::request::Framing;
use gale_protocol::request::{KnownHeader, RequestHead};
use gale_protocol::{Offence, http1};

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    // The first byte selects the limits and the position of the cut.
    let Some((&choice, input)) = data.split_first() else {
        return;
    };
    let limits = if choice & 1 == 0 {
        Limits::default()
    } else {
        Limits {
            line_max: 16 + choice as usize,
            head_max: 300,
            headers_max: 4,
            ignore_invalid_headers: choice & 2 == 0,
            underscores_in_headers: choice & 4 == 0,
        }
    };
    let (whole, head) = parse(input, &limits, &[]);
    let every: Vec<usize> = (0..=input.len()).collect();
    for cuts in [&every[..], &[usize::from(choice)]] {
        let (pieces, other) = parse(input, &limits, cuts);
        assert_eq!(whole, pieces);
        if whole.is_ok() {
            assert_eq!(format!("{head:?}"), format!("{other:?}"));
        }
    }
    match whole {
        Ok(Status::Complete { consumed }) => use_everything(input, consumed, &head),
        Ok(Status::NeedMore) => {}
        Err(offence) => {
            assert!(matches!(offence.status(), 400 | 414 | 494 | 501 | 505));
            let _ = offence.describe(input).to_string();
        }
    }
}

fn parse(input: &[u8], limits: &Limits, cuts: &[usize]) -> (Result<Status, Offence>, RequestHead) {
    let (mut parser, mut head) = (HeadParser::new(), RequestHead::default());
    for &cut in cuts {
        match parser.parse(&input[..cut.min(input.len())], limits, &mut head) {
            Ok(Status::NeedMore) => {}
            result => return (result, head),
        }
    }
    (parser.parse(input, limits, &mut head), head)
}

fn use_everything(input: &[u8], consumed: usize, head: &RequestHead) {
    assert!(consumed <= input.len());
    let mut scratch = Vec::new();
    let _ = head.target.normalized_path(input, true, &mut scratch);
    for field in &head.headers {
        assert!(field.value.end() <= consumed);
        assert!(!field.value.of(input).iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)));
        assert!(head.value_by_name(input, field.name.of(input)).is_some());
    }
    for &header in KnownHeader::ALL {
        assert_eq!(head.values(input, header).next(), head.value(input, header));
    }
    let _ = http1::wants_keep_alive(head, input);
    if let Some(authority) = &head.authority {
        assert!(!authority.lowercase_name(input, &mut scratch).is_empty());
    }
    let framed = head.has(KnownHeader::ContentLength) || head.has(KnownHeader::TransferEncoding);
    assert_eq!(framed, head.framing != Framing::None);
}
