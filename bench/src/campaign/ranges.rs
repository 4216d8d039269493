//! ranges: requests for parts of a file and of a stored response, well-formed and not.

use std::time::{Duration, Instant};

use super::Experiment;
use super::exchange::{Reply, ask, get_with};
use super::origin::{Origin, content};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, each_in_threads};
use crate::servers::{Setting, letters};
use crate::thread_pools::data_set::Random;

pub const EXPERIMENT: Experiment = Experiment {
    name: "ranges",
    does: "A file and a stored response are asked for by 600 Range fields each: single, many, overlapping, reversed, \
           beyond the end, beyond 64 bits, malformed, with If-Range.",
    holds: "Each part has the bytes that it says, a whole is whole, and no answer is much longer than the file.",
    needs: &[],
    not_on_nginx: None,
    run,
};

const LENGTH: usize = 64 << 10;
const FIELDS: usize = 600;
const FILE: &str = "/file-64k";
const STORED: &str = "/cached/65536/ranges";
const THREADS: usize = 8;
const LIMIT: Duration = Duration::from_secs(10);
/// Delimiter and fields of a part of a multipart body, at most.
const PART_OVERHEAD: usize = 256;

fn run(trial: &Trial) -> Result<Outcome, String> {
    let origin = Origin::plain()?;
    let setting = Setting {
        http: "proxy_cache_path cache keys_zone=cache:1m;".to_owned(),
        server: format!(
            "location /cached/ {{ proxy_pass http://{}; proxy_cache cache; proxy_cache_valid 200 1h; \
             proxy_force_ranges on; }}",
            origin.address
        ),
        ..Setting::default()
    };
    let mut watched = trial.start(setting)?;
    let tally = Tally::default();
    let all = [(FILE, letters(LENGTH)), (STORED, content(STORED))];
    // Twice: a server may keep the file of a stored response open once it was found.
    for (path, whole) in all.iter().chain(&all) {
        let begun = Instant::now();
        tally.must_answer(begun, path, &ask(watched.address(), &get_with(path, ""), LIMIT), whole);
    }
    watched.read_again();
    for (path, whole) in all {
        each_in_threads(THREADS, FIELDS, |number| {
            let (field, only) = field(number);
            let begun = Instant::now();
            match ask(watched.address(), &get_with(path, &field), LIMIT) {
                Err(error) => tally.lost(format!("{path} {}: {error}", field.escape_debug())),
                Ok(reply) => match check(&reply, &whole, only) {
                    Ok(()) => tally.answered(begun),
                    Err(error) => tally.wrong(format!("{path} {:.80}: {error}", field.escape_debug())),
                },
            }
        });
    }
    Ok(watched.finish(&tally))
}

/// The fields of one request, and the only part that may answer it, where there is one.
fn field(number: usize) -> (String, Option<(usize, usize)>) {
    const FIXED: [&str; 14] = [
        "bytes=",
        "bytes=-",
        "bytes=--1",
        "bytes=0-0,",
        "bytes=,0-0",
        "bytes=a-b",
        "bytes=5-2",
        "bytes=-0",
        "bytes=99999999999999999999-",
        "bytes=0-99999999999999999999",
        "bytes=-99999999999999999999",
        "items=0-1",
        "bytes=0-0\u{1}",
        "bytes 0-1",
    ];
    let range = |value: &str| format!("Range: {value}\r\n");
    if let Some(fixed) = FIXED.get(number) {
        return (range(fixed), None);
    }
    let mut random = Random(number as u64 * 0x9e37_79b9 + 1);
    if number.is_multiple_of(3) {
        let first = random.below(LENGTH);
        let last = first + random.below(LENGTH - first);
        let condition = if number.is_multiple_of(2) { "If-Range: \"no such tag\"\r\n" } else { "" };
        let only = condition.is_empty().then_some((first, last));
        return (range(&format!("bytes={first}-{last}")) + condition, only);
    }
    let count = 1 + random.below(if number % 10 == 1 { 500 } else { 8 });
    let parts: Vec<String> = (0..count).map(|_| part(&mut random)).collect();
    (range(&format!("bytes={}", parts.join(if number.is_multiple_of(2) { "," } else { " , " }))), None)
}

/// One range, right or reversed or beyond the end.
fn part(random: &mut Random) -> String {
    let (first, last) = (random.below(LENGTH * 5 / 4), random.below(LENGTH * 5 / 4));
    match random.below(4) {
        0 => format!("{first}-"),
        1 => format!("-{first}"),
        2 => format!("{}-{}", first.min(last), first.max(last)),
        _ => format!("{first}-{last}"),
    }
}

fn check(reply: &Reply, whole: &[u8], only: Option<(usize, usize)>) -> Result<(), String> {
    let slice = |range: (usize, usize)| whole.get(range.0..=range.1).ok_or_else(|| format!("{range:?} is not in it"));
    let same = |body: &[u8], expected: &[u8]| if body == expected { Ok(()) } else { Err("other bytes".to_owned()) };
    if !reply.is_whole {
        return Err(format!("status {}, cut", reply.status));
    }
    match (reply.status, reply.field("content-range"), only) {
        (200, _, None) => same(&reply.body, whole),
        (206, Some(told), only) => {
            let range = content_range(told, whole.len())?;
            if only.is_some_and(|only| only != range) {
                return Err(format!("{told} for {only:?}"));
            }
            same(&reply.body, slice(range)?)
        }
        (206, None, None) => {
            let parts = parts(reply)?;
            if reply.body.len() > whole.len() + (parts.len() + 1) * PART_OVERHEAD {
                return Err(format!("{} bytes in {} parts", reply.body.len(), parts.len()));
            }
            parts.iter().try_for_each(|(told, body)| same(body, slice(content_range(told, whole.len())?)?))
        }
        (416, Some(told), None) if told == format!("bytes */{}", whole.len()) => Ok(()),
        (400, _, None) => Ok(()),
        (status, told, _) => Err(format!("status {status}, Content-Range {told:?}")),
    }
}

/// `bytes FIRST-LAST/LENGTH`
fn content_range(told: &str, length: usize) -> Result<(usize, usize), String> {
    let read = || {
        let (range, all) = told.strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        (all.parse::<usize>().ok()? == length).then_some((first.parse().ok()?, last.parse().ok()?))
    };
    read().ok_or_else(|| format!("Content-Range: {told}"))
}

/// The Content-Range and the bytes of each part of a multipart body (RFC 9110, section 14.6).
fn parts(reply: &Reply) -> Result<Vec<(String, Vec<u8>)>, String> {
    let kind = reply.field("content-type").unwrap_or_default();
    let boundary = kind.split_once("boundary=").map(|(_, boundary)| boundary.trim_matches('"')).ok_or("no boundary")?;
    let delimiter = format!("\r\n--{boundary}");
    let mut parts = Vec::new();
    let mut rest = &reply.body[..];
    // The first delimiter may stand without its line end.
    let first = format!("--{boundary}");
    rest = rest.strip_prefix(b"\r\n").unwrap_or(rest).strip_prefix(first.as_bytes()).ok_or("no first delimiter")?;
    while let Some(part) = rest.strip_prefix(b"\r\n") {
        let head_end = find(part, b"\r\n\r\n").ok_or("a part without a head")?;
        let head = format!("\r\n{}", String::from_utf8_lossy(&part[..head_end]));
        let told = super::exchange::field_in(&head, "content-range").ok_or("a part without Content-Range")?.to_owned();
        let body = &part[head_end + 4..];
        let end = find(body, delimiter.as_bytes()).ok_or("a part without an end")?;
        parts.push((told, body[..end].to_vec()));
        rest = &body[end + delimiter.len()..];
    }
    if rest.starts_with(b"--") { Ok(parts) } else { Err("no last delimiter".to_owned()) }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_found_and_compared() {
        let body = b"\r\n--B\r\nContent-Type: a/b\r\nContent-Range: bytes 1-2/4\r\n\r\nbc\r\n\
            --B\r\nContent-Range: bytes 0-0/4\r\n\r\na\r\n--B--\r\n";
        let head = "HTTP/1.1 206 Partial\r\nContent-Type: multipart/byteranges; boundary=B\r\n\r\n".to_owned();
        let mut reply = Reply { status: 206, head, body: body.to_vec(), is_whole: true };
        assert_eq!(parts(&reply).unwrap().len(), 2);
        assert_eq!(check(&reply, b"abcd", None), Ok(()));
        assert!(check(&reply, b"axcd", None).is_err());
        reply.is_whole = false;
        assert!(check(&reply, b"abcd", None).is_err());
    }
}
