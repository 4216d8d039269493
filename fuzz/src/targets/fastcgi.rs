//! FastCGI records: decoding at once and byte by byte give the same result, and parameters of any bytes survive a round
//! trip.

use gale_protocol::fastcgi::{EndRequest, Event, FastCgiFault, Params, ResponseDecoder, trim_message};
use gale_protocol::gateway::ParamsWriter;

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let whole = decode(&mut std::iter::once(data));
    assert_eq!(whole, decode(&mut data.chunks(1)));
    if let Err(fault) = whole {
        assert!(fault.to_string().starts_with("upstream sent "));
    }
    // The first byte is the length of the name; the rest is the value.
    let Some((&cut, rest)) = data.split_first() else { return };
    let (name, value) = rest.split_at(rest.len().min(usize::from(cut)));
    let value = value.repeat(usize::from(cut));
    let mut out = Vec::new();
    let mut params = Params::new(&mut out);
    params.push(name, &value).unwrap();
    params.finish();
    let content = content(&out);
    assert!(content.ends_with(&value) && content[..content.len() - value.len()].ends_with(name));
}

/// Returns the joined content of the records, all of which must be complete.
fn content(mut records: &[u8]) -> Vec<u8> {
    let mut content = Vec::new();
    while let Some((&[1, 4, 0, 1, high, low, padding, 0], rest)) = records.split_first_chunk::<8>() {
        let length = usize::from(u16::from_be_bytes([high, low]));
        content.extend_from_slice(&rest[..length]);
        records = &rest[length + usize::from(padding)..];
    }
    assert!(records.is_empty());
    content
}

#[derive(PartialEq, Eq, Debug, Default)]
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
                    seen.stdout.extend_from_slice(&rest[range]);
                    seen.stdout_ended = false;
                }
                Some(Event::Stderr(range)) => {
                    assert!(rest[range.clone()].starts_with(trim_message(&rest[range.clone()])));
                    seen.stderr.extend_from_slice(&rest[range]);
                }
                Some(Event::StdoutEnd) => assert!(!std::mem::replace(&mut seen.stdout_ended, true)),
                Some(Event::EndRequest(end)) => assert_eq!(seen.end.replace(end), None),
                None => {}
            }
            total += decoded.consumed;
            if decoder.is_finished() {
                seen.consumed = Some(total);
                return Ok(seen);
            }
            assert!(decoded.consumed > 0 && decoder.stdout_remaining() <= usize::from(u16::MAX));
            rest = &rest[decoded.consumed..];
        }
    }
    Ok(seen)
}
