//! Replies of memcached: decoding at once and byte by byte give the same result, and a key is always written as one
//! word.

use gale_protocol::http1::Status;
use gale_protocol::memcached::{MemcachedFault, Reply, ReplyParser, ValueDecoder, write_get};

/// The reply, the value, and the length of both if they are complete.
type Read = (Reply, Vec<u8>, Option<usize>);

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    // The first byte is the length of the key that follows it.
    let Some((&length, rest)) = data.split_first() else { return };
    let (key, input) = rest.split_at(rest.len().min(usize::from(length)));
    let mut request = Vec::new();
    let mut sent: &[u8] = b"";
    if !key.is_empty() {
        let length = write_get(&mut request, key);
        sent = &request[request.len() - 2 - length..request.len() - 2];
        assert!(request.starts_with(b"get ") && !sent.iter().any(|&byte| byte <= b' '));
    }
    let whole = decode(input, sent, &mut std::iter::once(input.len()));
    assert_eq!(whole, decode(input, sent, &mut (0..=input.len())));
    if let Err(fault) = whole {
        fault.write_to(input, sent, &mut Vec::new());
    }
}

fn decode(
    input: &[u8],
    key: &[u8],
    ends: &mut dyn Iterator<Item = usize>,
) -> Result<Option<Read>, MemcachedFault> {
    let (mut parser, mut reply, mut head) = (ReplyParser::new(300), Reply::default(), None);
    for end in &mut *ends {
        if let Status::Complete { consumed } = parser.parse(&input[..end], key, &mut reply)? {
            head = Some((consumed, end));
            break;
        }
    }
    let Some((mut at, first_end)) = head else { return Ok(None) };
    let Reply::Found { length, .. } = reply else { return Ok(Some((reply, Vec::new(), Some(at)))) };
    let (mut decoder, mut value) = (ValueDecoder::new(length), Vec::new());
    for end in std::iter::once(first_end).chain(ends) {
        while at < end {
            let decoded = decoder.decode(&input[at..end])?;
            value.extend_from_slice(decoded.data.map_or(&[], |range| &input[at..end][range]));
            at += decoded.consumed;
            if decoded.finished {
                return Ok(Some((reply, value, Some(at))));
            }
            assert!(decoded.consumed > 0);
        }
    }
    Ok(Some((reply, value, None)))
}
