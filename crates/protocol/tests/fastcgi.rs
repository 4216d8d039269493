//! FastCGI: requests are readable by an application, responses are decoded however they are split, and every fault can
//! be triggered.

use gale_protocol::fastcgi::{
    CONTENT_MAX, EndRequest, Event, FastCgiFault, Params, ProtocolStatus, ResponseDecoder, STDIN_END, stdin_header,
    trim_message, write_abort_request, write_begin_request,
};
use gale_protocol::gateway::ParamsWriter;
use proptest::prelude::*;

/// Splits a request into records as an application does: type and content. Checks version, id and alignment.
fn records(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut records = Vec::new();
    while let Some((&[1, record_type, 0, 1, high, low, padding, 0], rest)) = bytes.split_first_chunk::<8>() {
        let length = usize::from(u16::from_be_bytes([high, low]));
        records.push((record_type, rest[..length].to_vec()));
        bytes = &rest[length + usize::from(padding)..];
    }
    assert!(bytes.is_empty(), "{bytes:?}");
    records
}

/// Decodes the parameters in the content of PARAMS records.
fn params(mut content: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    fn length(content: &mut &[u8]) -> usize {
        let (&first, rest) = content.split_first().unwrap();
        if first < 0x80 {
            *content = rest;
            return usize::from(first);
        }
        let (long, rest) = content.split_first_chunk::<4>().unwrap();
        *content = rest;
        (u32::from_be_bytes(*long) & 0x7fff_ffff) as usize
    }
    let mut params = Vec::new();
    while !content.is_empty() {
        let (name, value) = (length(&mut content), length(&mut content));
        params.push((content[..name].to_vec(), content[name..name + value].to_vec()));
        content = &content[name + value..];
    }
    params
}

fn written(pairs: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut params = Params::new(&mut out);
    pairs.iter().for_each(|(name, value)| params.push(name, value).unwrap());
    params.finish();
    out
}

#[test]
fn a_request_is_written_as_records() {
    let mut out = Vec::new();
    write_begin_request(&mut out, true);
    assert_eq!(out, b"\x01\x01\x00\x01\x00\x08\x00\x00\x00\x01\x01\x00\x00\x00\x00\x00");
    let mut params = Params::new(&mut out);
    params.push(b"A", b"bcd").unwrap();
    params.finish();
    out.extend_from_slice(&stdin_header(2));
    out.extend_from_slice(b"hi");
    out.extend_from_slice(&STDIN_END);
    write_abort_request(&mut out);
    let expected: [(u8, &[u8]); 6] =
        [(1, b"\0\x01\x01\0\0\0\0\0"), (4, b"\x01\x03Abcd"), (4, b""), (5, b"hi"), (5, b""), (2, b"")];
    assert_eq!(records(&out), expected.map(|(number, content)| (number, content.to_vec())));
    let mut out = Vec::new();
    write_begin_request(&mut out, false);
    assert_eq!(out[10], 0);
}

#[test]
fn lengths_of_parameters_take_one_byte_or_four() {
    for length in [0, 1, 127, 128, 255, 256, 65535, 65536] {
        let pairs = [(vec![b'n'; length], vec![b'v'; 127]), (vec![b'm'; 3], vec![b'w'; length])];
        let records = records(&written(&pairs));
        let content: Vec<u8> = records.iter().flat_map(|(_, content)| content.clone()).collect();
        assert_eq!(params(&content), pairs);
        let size = if length < 128 { 1 } else { 4 };
        assert_eq!(content.len(), 2 * (size + 1 + length) + 127 + 3);
    }
}

#[test]
fn many_parameters_fill_several_records() {
    for length in [CONTENT_MAX - 7, CONTENT_MAX - 6, CONTENT_MAX - 5, CONTENT_MAX - 4, 3 * CONTENT_MAX] {
        let pairs = [(b"A".to_vec(), vec![b'x'; length])];
        let records = records(&written(&pairs));
        let (last, full) = records.split_last().unwrap();
        assert_eq!(last, &(4, vec![]));
        assert!(full[..full.len() - 1].iter().all(|(_, content)| content.len() == CONTENT_MAX));
        assert!(full.iter().all(|(number, content)| *number == 4 && !content.is_empty()));
        let content: Vec<u8> = full.iter().flat_map(|(_, content)| content.clone()).collect();
        assert_eq!(params(&content), pairs);
    }
    assert_eq!(records(&written(&[])), [(4, vec![])]);
}

#[test]
fn a_parameter_that_fits_in_a_record_is_not_spread_over_two() {
    for length in [1, 100, 20_000, 40_000, CONTENT_MAX - 6, CONTENT_MAX - 5] {
        let pairs: Vec<_> = (0..4000.min(500_000 / length)).map(|_| (b"N".to_vec(), vec![b'v'; length - 1])).collect();
        let read: Vec<_> = records(&written(&pairs)).iter().flat_map(|(_, content)| params(content)).collect();
        assert_eq!(read, pairs, "{length}");
    }
}

/// A record as sent by an application.
fn record(number: u8, id: u16, content: &[u8], padding: u8) -> Vec<u8> {
    let (id, length) = (id.to_be_bytes(), (content.len() as u16).to_be_bytes());
    let mut record = vec![1, number, id[0], id[1], length[0], length[1], padding, 0];
    record.extend_from_slice(content);
    record.extend(std::iter::repeat_n(0xee, usize::from(padding)));
    record
}

const STDOUT: u8 = 6;
const STDERR: u8 = 7;
const END_REQUEST: u8 = 3;

/// Result of decoding: the response, the messages, whether the response ended, how the request ended, and after how
/// many bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Seen {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    stdout_ended: bool,
    end: Option<EndRequest>,
    consumed: Option<usize>,
}

fn decode(pieces: &mut dyn Iterator<Item = &[u8]>) -> Result<Seen, FastCgiFault> {
    let (mut decoder, mut seen, mut total) = (ResponseDecoder::new(), Seen::default(), 0);
    for mut rest in pieces {
        while !rest.is_empty() {
            let decoded = decoder.decode(rest)?;
            match decoded.event {
                Some(Event::Stdout(range)) => {
                    assert!(!range.is_empty() && range.end == decoded.consumed);
                    seen.stdout.extend_from_slice(&rest[range]);
                    seen.stdout_ended = false;
                }
                Some(Event::Stderr(range)) => {
                    assert!(!range.is_empty() && range.end == decoded.consumed);
                    seen.stderr.extend_from_slice(&rest[range]);
                }
                Some(Event::StdoutEnd) => assert!(!std::mem::replace(&mut seen.stdout_ended, true)),
                Some(Event::EndRequest(end)) => assert_eq!(seen.end.replace(end), None),
                None => {}
            }
            assert_eq!(decoder.has_stdout_ended(), seen.stdout_ended);
            total += decoded.consumed;
            if decoder.is_finished() {
                seen.consumed = Some(total);
                assert_eq!(decoder.decode(&rest[decoded.consumed..]).unwrap().consumed, 0);
                return Ok(seen);
            }
            assert!(decoded.consumed > 0);
            rest = &rest[decoded.consumed..];
        }
    }
    Ok(seen)
}

fn whole(input: &[u8]) -> Result<Seen, FastCgiFault> {
    let result = decode(&mut std::iter::once(input));
    assert_eq!(result, decode(&mut input.chunks(1)));
    result
}

fn complete() -> EndRequest {
    EndRequest { app_status: 0, protocol_status: ProtocolStatus::RequestComplete }
}

#[test]
fn streams_are_told_apart() {
    let input = [
        record(STDERR, 1, b"PHP message: oh", 3),
        record(STDOUT, 1, b"Status: 404\r\n\r\nbo", 0),
        record(10, 0, b"\x0e\x01FCGI_MPXS_CONNS0", 7),
        record(STDERR, 1, b" no\n", 0),
        record(STDOUT, 1, b"dy", 255),
        record(11, 0, &[9, 0, 0, 0, 0, 0, 0, 0], 0),
        record(STDOUT, 1, b"", 8),
        record(STDERR, 1, b"", 0),
        record(END_REQUEST, 1, &[0; 8], 5),
    ]
    .concat();
    let seen = whole(&input).unwrap();
    assert_eq!(seen.stdout, b"Status: 404\r\n\r\nbody");
    assert_eq!(trim_message(&seen.stderr), b"PHP message: oh no");
    assert_eq!((seen.stdout_ended, seen.end, seen.consumed), (true, Some(complete()), Some(input.len())));
    let with_more = [&input[..], b"GET"].concat();
    assert_eq!(whole(&with_more).unwrap(), seen);
    for end in 0..input.len() {
        assert_eq!(whole(&input[..end]).unwrap().consumed, None, "{end}");
    }
}

#[test]
fn ends_of_requests_are_read() {
    let end = |content: &[u8]| whole(&record(END_REQUEST, 1, content, 1)).unwrap().end;
    let overloaded = EndRequest { app_status: 0x01020304, protocol_status: ProtocolStatus::Overloaded };
    assert_eq!(end(&[1, 2, 3, 4, 2, 0, 0, 0]), Some(overloaded));
    assert_eq!(end(&[1, 2, 3, 4, 2, 0, 0, 0, 9, 9]), Some(overloaded));
    assert_eq!(end(&[1, 2, 3, 4, 2]), Some(overloaded));
    assert_eq!(end(&[]), Some(complete()));
    let status = |number| end(&[0, 0, 0, 0, number, 0, 0, 0]).unwrap().protocol_status;
    assert_eq!(status(1), ProtocolStatus::CannotMultiplex);
    assert_eq!(status(3), ProtocolStatus::UnknownRole);
    assert_eq!(status(4), ProtocolStatus::Other(4));
    // php-fpm ends the request without ending its response first.
    let seen = whole(&[record(STDOUT, 1, b"x", 0), record(END_REQUEST, 1, &[0; 8], 0)].concat()).unwrap();
    assert_eq!((seen.stdout_ended, seen.end), (false, Some(complete())));
}

#[test]
fn stdout_behind_an_empty_record_goes_on() {
    let parts = [record(STDOUT, 1, b"one ", 0), record(STDOUT, 1, b"", 0), record(STDOUT, 1, b"two", 0)];
    let seen = whole(&parts.concat()).unwrap();
    assert_eq!((&seen.stdout[..], seen.stdout_ended), (&b"one two"[..], false));
    let seen = whole(&[&parts[..], &[record(STDOUT, 1, b"", 0)]].concat().concat()).unwrap();
    assert_eq!((&seen.stdout[..], seen.stdout_ended), (&b"one two"[..], true));
}

#[test]
fn faults_have_nginx_words() {
    for (input, message) in [
        (b"HTTP/1.1".to_vec(), "upstream sent unsupported FastCGI protocol version: 72"),
        (b"\0".to_vec(), "upstream sent unsupported FastCGI protocol version: 0"),
        (record(5, 1, b"", 0), "upstream sent invalid FastCGI record type: 5"),
        (b"\x01\xff".to_vec(), "upstream sent invalid FastCGI record type: 255"),
        (record(STDOUT, 2, b"", 0), "upstream sent unexpected FastCGI request id low byte: 2"),
        (record(STDOUT, 0, b"", 0), "upstream sent unexpected FastCGI request id low byte: 0"),
        (record(STDERR, 0x301, b"", 0), "upstream sent unexpected FastCGI request id high byte: 3"),
        (record(10, 1, b"", 0), "upstream sent unexpected FastCGI request id low byte: 1"),
    ] {
        assert_eq!(whole(&input).unwrap_err().to_string(), message);
    }
}

#[test]
fn the_rest_of_a_record_is_known() {
    let mut decoder = ResponseDecoder::new();
    let input = record(STDOUT, 1, b"01234567", 4);
    assert_eq!(decoder.decode(&input[..8]).unwrap().event, None);
    assert_eq!(decoder.stdout_remaining(), 8);
    assert_eq!(decoder.decode(b"012").unwrap().event, Some(Event::Stdout(0..3)));
    assert_eq!(decoder.stdout_remaining(), 5);
    decoder.decode(b"34567").unwrap();
    assert_eq!(decoder.stdout_remaining(), 0);
}

#[test]
fn messages_are_trimmed_as_nginx_does() {
    assert_eq!(trim_message(b"a. b. \r\n"), b"a. b");
    assert_eq!(trim_message(b" .\r\n"), b"");
    assert_eq!(trim_message(b""), b"");
}

proptest! {
    #[test]
    fn params_are_read_back(lengths in prop::collection::vec((0..300usize, 0..9000usize), 0..30)) {
        let text = |length: usize| (0..length).map(|at| at as u8).collect::<Vec<u8>>();
        let pairs: Vec<_> = lengths.iter().map(|&(name, value)| (text(name), text(value))).collect();
        let content: Vec<u8> = records(&written(&pairs)).into_iter().flat_map(|(_, content)| content).collect();
        prop_assert_eq!(params(&content), pairs);
    }

    #[test]
    fn splitting_makes_no_difference(
        parts in prop::collection::vec((prop::sample::select(vec![STDOUT, STDERR, END_REQUEST, 10, 11, 0]),
                                        prop::collection::vec(any::<u8>(), 0..20), any::<u8>()), 0..8),
        noise in prop::collection::vec(any::<u8>(), 0..9),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let mut input = Vec::new();
        for (number, content, padding) in parts {
            input.extend(record(number, u16::from(number < 10), &content, padding));
        }
        input.extend(noise);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(input.len() + 1)).collect();
        cuts.extend([0, input.len()]);
        cuts.sort();
        let pieces = decode(&mut cuts.windows(2).map(|ends| &input[ends[0]..ends[1]]));
        prop_assert_eq!(whole(&input), pieces);
    }
}
