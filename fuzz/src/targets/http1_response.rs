//! Response heads: parsing at once, byte by byte and in two pieces give the same result, and no accessor panics.

use gale_protocol::ResponseFault;
use gale_protocol::http1::{ResponseFraming, ResponseHeadParser, ResponseParts, Status};
use gale_protocol::request::Method;
use gale_protocol::response::ResponseField;

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    // The first byte selects the format, the limit and the position of the cut.
    let Some((&choice, input)) = data.split_first() else {
        return;
    };
    let head_max = if choice & 1 == 0 { 4096 } else { usize::from(choice) };
    let parser = match choice >> 1 & 3 {
        0 | 1 => ResponseHeadParser::new(head_max),
        2 => ResponseHeadParser::cgi(head_max),
        _ => ResponseHeadParser::cgi_or_http(head_max),
    };
    let (whole, parts) = parse(parser.clone(), input, &[]);
    let every: Vec<usize> = (0..=input.len()).collect();
    for cuts in [&every[..], &[usize::from(choice)]] {
        let (pieces, other) = parse(parser.clone(), input, cuts);
        assert_eq!(whole, pieces);
        assert_eq!(format!("{parts:?}"), format!("{other:?}"));
    }
    match whole {
        Ok(Status::Complete { consumed }) => use_everything(input, consumed, &parts),
        Ok(Status::NeedMore) => {}
        Err(fault) => fault.write_to(input, &mut Vec::new()),
    }
}

fn parse(
    mut parser: ResponseHeadParser,
    input: &[u8],
    cuts: &[usize],
) -> (Result<Status, ResponseFault>, ResponseParts) {
    let mut parts = ResponseParts::default();
    for &cut in cuts {
        match parser.parse(&input[..cut.min(input.len())], &mut parts) {
            Ok(Status::NeedMore) => {}
            result => return (result, parts),
        }
    }
    (parser.parse(input, &mut parts), parts)
}

fn use_everything(input: &[u8], consumed: usize, parts: &ResponseParts) {
    assert!(consumed <= input.len() && (100..1000).contains(&parts.status));
    for field in &parts.fields {
        assert!(field.value.end() <= consumed && !field.name.is_empty());
        assert!(!field.value.of(input).iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)));
    }
    for &field in ResponseField::ALL {
        assert_eq!(parts.values(input, field).next(), parts.value(input, field));
        assert_eq!(parts.has(field), parts.field(field).is_some());
    }
    if let Some(line) = parts.ignored_first {
        line.write_to(input, &mut Vec::new());
    }
    for method in [Method::Get, Method::Head, Method::Connect] {
        let framing = ResponseFraming::decide(method, parts);
        assert!(!parts.keeps_alive(framing) || !matches!(framing, ResponseFraming::UntilClose));
    }
}
