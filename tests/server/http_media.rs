//! Parts of media files over real sockets: flv and mp4. (The index of a part is tested with the module.)

use std::time::{Duration, Instant};

use crate::support::{Driver, Response, Server, Setup, with_each_driver};

with_each_driver!(
    a_flash_video_begins_at_an_offset_with_a_head,
    invalid_start_gets_the_whole_video,
    a_film_is_cut_to_the_time_that_is_wanted,
    a_film_without_times_is_sent_as_it_is,
    parts_of_a_part_can_be_had,
    a_film_that_is_none_is_an_error,
    an_index_that_is_too_long_is_refused,
    directories_and_missing_files_are_left_to_other_modules,
    a_film_goes_out_as_fast_as_it_is_watched_where_the_location_says_so,
);

const HEAD: &[u8] = b"FLV\x01\x05\0\0\0\x09\0\0\0\0";

/// Lengths of a file that is kept in memory and of one that is not.
const LENGTHS: [usize; 2] = [1_000, 400_000];

fn sample(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index % 251) as u8).collect()
}

#[track_caller]
fn ask(server: &Server, method: &str, path: &str, fields: &str) -> Response {
    let mut client = server.connect();
    client.send(format!("{method} {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"));
    if method == "HEAD" { client.response_to_head() } else { client.response() }
}

fn start(driver: Driver, text: &str) -> Setup {
    let setup = Setup::server(driver, &format!("types {{ video/mp4 mp4; }} root %DIR%/html; {text}"));
    let setup = setup.file("html/film.mp4", film(b"", 100)).file("html/late.mp4", late_film());
    LENGTHS.iter().fold(setup, |setup, &length| setup.file(&format!("html/{length}.flv"), sample(length)))
}

fn a_flash_video_begins_at_an_offset_with_a_head(driver: Driver) {
    let server = start(driver, "location / { flv; }").start();
    for length in LENGTHS {
        let path = format!("/{length}.flv?start=100");
        let expected = [HEAD, &sample(length)[100..]].concat();
        for _ in 0..3 {
            let response = server.get(&path);
            assert_eq!((response.status, response.body == expected), (200, true), "{length}");
        }
        let head = ask(&server, "HEAD", &path, "");
        assert_eq!(head.header("Content-Length"), Some(&*expected.len().to_string()));
        let range = ask(&server, "GET", &path, "Range: bytes=10-19\r\n");
        assert_eq!((range.status, &range.body[..]), (206, &expected[10..20]));
        assert_eq!(range.header("Content-Range"), Some(&*format!("bytes 10-19/{}", expected.len())));
    }
    server.stop();
}

fn invalid_start_gets_the_whole_video(driver: Driver) {
    let server = start(driver, "location / { flv; }").start();
    for start in ["", "0", "-1", "1000", "99999999999999999999", "1.5", "x"] {
        assert_eq!(server.get(&format!("/1000.flv?start={start}")).body, sample(1_000), "{start}");
    }
    assert_eq!(ask(&server, "POST", "/1000.flv", "Content-Length: 0\r\n").status, 405);
    assert_eq!((server.get("/none.flv").status, server.get("/").status), (404, 403));
    server.stop();
}

fn put(out: &mut Vec<u8>, name: &[u8; 4], data: &[&[u8]]) {
    let data = data.concat();
    out.extend_from_slice(&(data.len() as u32 + 8).to_be_bytes());
    out.extend_from_slice(name);
    out.extend(data);
}

fn atom(name: &[u8; 4], data: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    put(&mut out, name, data);
    out
}

fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_be_bytes()).collect()
}

/// Index of a film of `seconds` samples of one second, each in a chunk of its own, the first of them at `begin`.
fn index(begin: u32, extra: &[u8], seconds: u32) -> Vec<u8> {
    let offsets: Vec<u32> = (0..seconds).map(|number| begin + 10 * number).collect();
    let samples = [
        atom(b"stts", &[&numbers(&[0, 1, seconds, 1_000])]),
        atom(b"stsc", &[&numbers(&[0, 1, 1, 1, 1])]),
        atom(b"stsz", &[&numbers(&[0, 0, seconds]), &numbers(&vec![10; seconds as usize])]),
        atom(b"stco", &[&numbers(&[0, seconds]), &numbers(&offsets)]),
    ];
    let media_head = atom(b"mdhd", &[&numbers(&[0, 0, 0, 1_000, 1_000 * seconds, 0])]);
    let media = atom(b"mdia", &[&media_head, &atom(b"minf", &[&atom(b"stbl", &[&samples.concat()])])]);
    let head = atom(b"mvhd", &[&numbers(&[0, 0, 0, 1_000, 1_000 * seconds]), &[0; 80]]);
    atom(b"moov", &[&head, &atom(b"trak", &[&media]), extra])
}

fn media(seconds: u32) -> Vec<u8> {
    (0..seconds).flat_map(|number| format!("{number:09}\n").into_bytes()).collect()
}

fn film(extra: &[u8], seconds: u32) -> Vec<u8> {
    let begin = index(0, extra, seconds).len() as u32 + 8;
    [index(begin, extra, seconds), atom(b"mdat", &[&media(seconds)])].concat()
}

/// The same film with its index at the end.
fn late_film() -> Vec<u8> {
    [atom(b"mdat", &[&media(100)]), index(8, b"", 100)].concat()
}

/// The expected part of the film.
fn part(first: u32, seconds: u32) -> Vec<u8> {
    let media = &media(100)[first as usize * 10..][..seconds as usize * 10];
    // The index that a film of this length has. An `end` adds rows of chunks, which are not in it.
    let begin = index(0, b"", seconds).len() as u32 + 8;
    [index(begin, b"", seconds), atom(b"mdat", &[media])].concat()
}

fn a_film_is_cut_to_the_time_that_is_wanted(driver: Driver) {
    let server = start(driver, "location / { mp4; } location /pool/ { alias %DIR%/html/; mp4; aio threads; }").start();
    for path in ["/film.mp4", "/late.mp4", "/pool/film.mp4"] {
        let whole = server.get(path);
        let response = server.get(&format!("{path}?start=90.5"));
        assert_eq!((response.status, response.header("Content-Type")), (200, Some("video/mp4")), "{}", server.log());
        // The sample that is shown at that time, and those after it.
        let expected = part(90, 10);
        assert_eq!(response.body.len(), expected.len(), "{path}");
        assert!(response.body.ends_with(&media(100)[900..]), "{path}");
        assert_eq!(response.header("ETag"), whole.header("ETag"));
        for (times, first, seconds) in [("start=20&end=30", 20, 10), ("end=5", 0, 5), ("START=99&END=50", 99, 1)] {
            let response = server.get(&format!("{path}?{times}"));
            assert_eq!((response.status, response.body.len()), (200, part(first, seconds).len()), "{path} {times}");
            assert!(
                response.body.ends_with(&part(first, seconds)[part(first, seconds).len() - 10..]),
                "{path} {times}"
            );
        }
    }
    assert_eq!(
        ask(&server, "HEAD", "/film.mp4?start=90", "").header("Content-Length"),
        Some(&*part(90, 10).len().to_string())
    );
    assert_eq!(server.get("/late.mp4?start=0").body, film(b"", 100), "the index is moved to the beginning");
    server.stop();
}

fn a_film_without_times_is_sent_as_it_is(driver: Driver) {
    let server = start(driver, "location / { mp4; }").start();
    for times in ["", "?start=0", "?start=x", "?end=0", "?start=-1&end=-2", "?start=&end="] {
        assert_eq!(server.get(&format!("/film.mp4{times}")).body, film(b"", 100), "{times}");
    }
    assert_eq!(server.get("/late.mp4").body, late_film());
    assert_eq!(ask(&server, "POST", "/film.mp4", "Content-Length: 0\r\n").status, 405);
    server.stop();
}

fn parts_of_a_part_can_be_had(driver: Driver) {
    let server = start(driver, "location / { mp4; }").start();
    let whole = server.get("/film.mp4?start=50").body;
    let length = whole.len();
    let range = ask(&server, "GET", "/film.mp4?start=50", &format!("Range: bytes=4-9, {}-\r\n", length - 20));
    assert_eq!(range.status, 206);
    let text = String::from_utf8_lossy(&range.body);
    assert!(text.contains(&format!("Content-Range: bytes 4-9/{length}")), "{text}");
    assert!(text.contains("000000098\n000000099\n"), "{text}");
    server.stop();
}

fn a_film_that_is_none_is_an_error(driver: Driver) {
    let server =
        start(driver, "location / { mp4; }").file("html/empty.mp4", "").file("html/text.mp4", "no film").start();
    assert_eq!((server.get("/text.mp4").text(), server.get("/empty.mp4").text()), ("no film", ""));
    for (path, message) in [
        ("/empty.mp4?start=1", "no mp4 trak atoms were found in \""),
        ("/text.mp4?start=1", "html/text.mp4\" mp4 atom too large:1852776550"),
        ("/film.mp4?start=101", "html/film.mp4\" mp4 start time exceeds file duration"),
        ("/film.mp4?start=5.1&end=5.2", "no data between start time and end time in \""),
    ] {
        let response = server.get(path);
        assert_eq!((response.status, response.header("ETag")), (500, None), "{path}");
        server.wait_logged(message);
    }
    server.stop();
}

fn an_index_that_is_too_long_is_refused(driver: Driver) {
    let setup = start(
        driver,
        "location / { mp4; mp4_buffer_size 1k; mp4_max_buffer_size 4k; }
         location /more/ { alias %DIR%/html/; mp4; mp4_buffer_size 10k; mp4_max_buffer_size 4k; }",
    );
    let server = setup.file("html/long.mp4", film(&atom(b"udta", &[&[0; 5_000]]), 10)).start();
    assert_eq!((server.get("/film.mp4?start=1").status, server.get("/long.mp4?start=1").status), (200, 500));
    server.wait_logged("long.mp4\" mp4 moov atom is too large:");
    assert_eq!(server.get("/more/long.mp4?start=1").status, 200);
    server.stop();
}

fn directories_and_missing_files_are_left_to_other_modules(driver: Driver) {
    let setup = start(driver, "location / { mp4; } location /flv/ { alias %DIR%/html/; flv; }");
    let server = setup.file("html/directory/index.html", "index").start();
    for path in ["", "/flv"] {
        assert_eq!(server.get(&format!("{path}/directory/")).text(), "index", "{path}");
        assert_eq!(server.get(&format!("{path}/directory?start=1")).status, 301, "{path}");
        assert_eq!(server.get(&format!("{path}/none?start=1")).status, 404, "{path}");
    }
    server.stop();
}

fn a_film_goes_out_as_fast_as_it_is_watched_where_the_location_says_so(driver: Driver) {
    let text = "add_header X-Rate $limit_rate;
        location /on/ { alias %DIR%/html/; mp4; mp4_limit_rate on; mp4_limit_rate_after 1h; limit_rate 1; }
        location /slow/ { alias %DIR%/html/; mp4; mp4_limit_rate 50; mp4_limit_rate_after 0; }
        location /off/ { alias %DIR%/html/; mp4; mp4_limit_rate off; }";
    let endless = atom(b"mvhd", &[&numbers(&[0, 0, 0, 1_000, u32::MAX]), &[0; 80]]);
    let setup = start(driver, text).file("html/none.mp4", atom(b"mdat", &[b"no film"]));
    let server = setup.file("html/endless.mp4", atom(b"moov", &[&endless])).start();
    let whole = film(b"", 100);
    // The file's size divided by its 100 seconds, for any part of it; bytes before the limit begins take no time.
    let rate = (whole.len() * 1_100 / 100_000).to_string();
    for path in ["/on/film.mp4", "/on/late.mp4", "/on/film.mp4?start=50"] {
        let response = server.get(path);
        assert_eq!((response.status, response.header("X-Rate")), (200, Some(&*rate)), "{path}");
    }
    // The rate sends the film in two seconds.
    let begun = Instant::now();
    let response = server.get("/slow/film.mp4");
    assert_eq!(response.header("X-Rate"), Some(&*(whole.len() / 2).to_string()));
    assert_eq!(response.body, whole);
    assert!(begun.elapsed() >= Duration::from_millis(900));
    // A file without a duration has the location's rate.
    assert_eq!(server.get("/off/film.mp4").header("X-Rate"), Some("0"));
    for path in ["/slow/none.mp4", "/slow/endless.mp4"] {
        assert_eq!(server.get(path).header("X-Rate"), Some("0"), "{path}");
    }
    server.stop();
}
