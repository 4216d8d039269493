//! The delivery ladder through the real binary: every method of sending files delivers the same bytes, cached files do
//! not wait for disks, and broken disks only affect requests for their files.

use std::fs::{File, FileTimes};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use rustix::fs::{Advice, CWD, FileType, Mode};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::Signal;

use crate::support::fuse;
use crate::support::{
    Client, DEADLINE, Directory, Driver, Response, Server, Setup, has_own_mounts, is_root, skip, wait_ended,
    with_each_driver,
};

with_each_driver!(
    every_way_delivers_the_same,
    pieces_take_the_rung_that_does_not_wait,
    a_pool_that_is_not_there_is_an_error_of_its_request,
    full_pool_refuses_only_files_not_in_memory,
    fifos_and_sockets_are_never_waited_for,
    unprivileged_worker_serves_readable_files,
    every_file_system_delivers_the_same,
    a_disk_has_the_number_of_its_files,
    a_mount_says_which_reads_are_left_to_threads,
    broken_file_system_delays_only_its_own_requests,
    reads_that_never_end_delay_no_other_requests,
    nor_do_they_hold_up_the_end_of_the_server,
    hanging_reads_do_not_delay_the_successor_of_a_dead_worker,
    nor_do_they_keep_an_address_when_the_server_waits_for_a_client,
    nor_does_a_worker_keep_an_address_that_died_in_a_graceful_stop,
    nor_does_one_that_an_old_binary_has_left_behind,
    a_reload_goes_on_without_a_loop_that_waits_for_ever,
);

const SIZES: [usize; 7] = [0, 1, 4096, 65_535, 65_536, 300_001, 3 << 20];

fn pattern(length: usize) -> Vec<u8> {
    (0..length as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// Settings of a location for files.
const WAYS: &[(&str, &str)] = &[
    ("auto", ""),
    ("auto_sendfile", "sendfile on;"),
    ("on", "aio on;"),
    ("on_sendfile", "aio on; sendfile on; tcp_nopush on;"),
    ("off", "aio off;"),
    ("off_sendfile", "aio off; sendfile on; sendfile_max_chunk 100k;"),
    ("threads", "aio threads;"),
    ("one", "aio threads=one; sendfile on; sendfile_max_chunk 70k;"),
    ("variable", "aio threads=$arg_pool; output_buffers 1 512k;"),
    ("direct", "directio 60k; sendfile on;"),
    ("direct_on", "aio on; directio 60k; directio_alignment 4k;"),
    ("direct_off", "aio off; directio 1;"),
    ("ahead", "read_ahead 1m; output_buffers 4 4k; postpone_output 0; send_lowat 10;"),
];

fn ways(root: &str) -> String {
    let way = |(name, settings): &(&str, &str)| format!("location /{name}/ {{ alias {root}/; {settings} }}\n");
    WAYS.iter().map(way).collect()
}

fn setup(driver: Driver, text: &str) -> Setup {
    let hooks = "location = /files { test_files; } location = /pools { test_pools; }";
    let setup = Setup::server(driver, &format!("{text} {hooks} location = /quick {{ return 200 quick; }}"));
    setup.replace("daemon off;", "daemon off; thread_pool one threads=1; thread_pool none threads=1 max_queue=0;")
}

/// Evicts a file from the page cache, after writing it to the disk.
fn evict(path: &Path) {
    // Some file systems keep all pages.
    for _ in 0..20 {
        // Pages that are being read ahead stay, so the whole file is read first.
        let _ = std::fs::read(path).expect("there");
        let file = File::open(path).expect("there");
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).expect("advised");
        // So do pages that another process uses at this moment.
        if resident_pages(&file) == 0 {
            break;
        }
    }
}

/// Evicts a file on a file system that permits it; waits for other users of its pages.
fn evict_whole(path: &Path) {
    let file = File::open(path).expect("there");
    let is_evicted = (0..1000).any(|_| {
        evict(path);
        resident_pages(&file) == 0
    });
    assert!(is_evicted, "{} stays in memory", path.display());
}

/// Number of a file's pages in memory; 0 where the kernel does not tell.
fn resident_pages(file: &File) -> usize {
    let length = file.metadata().expect("there").len() as usize;
    let mut pages = vec![0u8; length.div_ceil(rustix::param::page_size())];
    if length == 0 {
        return 0;
    }
    // SAFETY: the mapping is new and unmapped below; its bytes are not read. `pages` has a byte for each page.
    unsafe {
        let mapping = rustix::mm::mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file, 0);
        let Ok(mapping) = mapping else { return 0 };
        assert_eq!(libc::mincore(mapping, length, pages.as_mut_ptr()), 0);
        rustix::mm::munmap(mapping, length).expect("mapped above");
    }
    pages.iter().filter(|&page| page & 1 != 0).count()
}

/// Reads this much of a file into the page cache, without read-ahead.
fn read_beginning(path: &Path, length: usize) {
    evict(path);
    let file = File::open(path).expect("there");
    rustix::fs::fadvise(&file, 0, None, Advice::Random).expect("advised");
    file.read_exact_at(&mut vec![0; length], 0).expect("long enough");
}

/// `true` if files can be evicted here; this one has been then.
fn can_evict(path: &Path) -> bool {
    let file = File::open(path).expect("there");
    file.sync_all().expect("written");
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).expect("advised");
    let mut byte = [0];
    let look =
        rustix::io::preadv2(&file, &mut [std::io::IoSliceMut::new(&mut byte)], 0, rustix::io::ReadWriteFlags::NOWAIT);
    // The check itself has started a read.
    let is_cold = look == Err(rustix::io::Errno::AGAIN);
    evict(path);
    is_cold
}

/// A figure from the status of files or pools.
fn figure(text: &str, name: &str) -> u64 {
    let found = text.split_ascii_whitespace().find_map(|word| word.strip_prefix(&format!("{name}=")));
    found.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
}

/// Requests all files by all methods, cached and not, whole and in part.
#[track_caller]
fn check_all(server: &Server, directory: &Path) {
    for &size in &SIZES {
        let path = directory.join(size.to_string());
        std::fs::write(&path, pattern(size)).expect("written");
        File::open(&path).and_then(|file| file.sync_all()).expect("on the disk");
        let mut client = server.connect();
        for (way, _) in WAYS {
            let uri = format!("/{way}/{size}?pool=one");
            for is_cold in [true, false] {
                if is_cold {
                    evict(&path);
                }
                let response = client.get(&uri);
                assert_eq!(response.status, 200, "{uri} {is_cold}\n{server}");
                assert!(response.body == pattern(size), "{uri} {is_cold}");
            }
            if size > 1000 {
                evict(&path);
                let range = (size / 3, size - size / 7);
                let response = client.ask(format!(
                    "GET {uri} HTTP/1.1\r\nHost: h\r\nRange: bytes={}-{}\r\n\r\n",
                    range.0,
                    range.1 - 1
                ));
                assert!(response.status == 206 && response.body == pattern(size)[range.0..range.1], "{uri} {range:?}");
            }
        }
    }
}

fn every_way_delivers_the_same(driver: Driver) {
    let server = setup(driver, &ways("%DIR%/files")).file("files/x", "").start();
    check_all(&server, &server.directory.path().join("files"));
    server.stop();
}

fn pieces_take_the_rung_that_does_not_wait(driver: Driver) {
    let size = 1 << 20;
    let server = setup(driver, &ways("%DIR%/files")).file("files/big", pattern(size)).start();
    let path = server.directory.path().join("files/big");
    if !can_evict(&path) {
        return skip("nothing can be evicted from memory here");
    }
    let ask = |way: &str, is_cold: bool| {
        if is_cold {
            evict(&path);
        }
        let before = server.get("/files").text().to_owned();
        assert!(server.get(&format!("/{way}/big?pool=one")).body == pattern(size));
        let after = server.get("/files").text().to_owned();
        move |name: &str| figure(&after, name) - figure(&before, name)
    };
    // Read once, as by the first request.
    let _ = ask("auto", false);
    // A loop that had to wait for its core takes the device for slow for a while.
    server.directory.wait_until("a read at once", |_| {
        let hot = ask("auto", false);
        (hot("read_bytes"), hot("pool"), hot("blocking"), hot("sendfile")) == (size as u64, 0, 0, 0)
    });
    server.directory.wait_until("sent at once", |_| {
        let hot = ask("auto_sendfile", false);
        (hot("sendfile_bytes"), hot("pool"), hot("blocking")) == (size as u64, 0, 0)
    });
    for way in ["auto", "auto_sendfile", "threads", "one", "variable"] {
        // The kernel may have read the file when it is requested again. A page in use elsewhere stays in memory, or is
        // evicted between check and read: then the request is repeated. And after a cached page was evicted, a loop
        // does not try again for up to half a minute.
        server.directory.wait_until(way, |_| {
            let cold = ask(way, true);
            let was_read_elsewhere = way == "auto_sendfile" || cold("pool") > 0;
            was_read_elsewhere && cold("probe_misses") > 0 && cold("blocking") == 0
        });
    }
    let cold = ask("on", true);
    let is_ring = driver == Driver::IoUring && cold("io_uring") > 0;
    assert!(is_ring || cold("pool") > 0);
    for way in ["off", "off_sendfile", "direct_off"] {
        let cold = ask(way, true);
        assert_eq!((cold("blocking_bytes"), cold("pool"), cold("probe_hits")), (size as u64, 0, 0), "{way}");
    }
    // The only read that writes the time of access is done by a thread, where reads write it.
    if rustix::fs::statvfs(&path).expect("there").f_flag.contains(rustix::fs::StatVfsMountFlags::RELATIME) {
        server.directory.wait_until("one read that writes the time of access", |_| {
            make_unread(&path);
            let due = ask("auto_sendfile", false);
            assert!(due("pool") > 0 && due("blocking") == 0, "{server}");
            let next = ask("auto", false);
            (next("pool"), next("blocking")) == (0, 0)
        });
    }
    // Direct reads neither find pages in the page cache nor leave any there.
    let direct = ask("direct", true);
    assert!(direct("pool_bytes") == size as u64 && direct("probe_hits") == 0);
    server.stop();
}

fn a_pool_that_is_not_there_is_an_error_of_its_request(driver: Driver) {
    let zip = "location /zip/ { alias %DIR%/files/; aio threads=$arg_pool; gzip on; gzip_types *; }";
    let text = format!("{}{zip}", ways("%DIR%/files"));
    let server = setup(driver, &text).file("files/big", pattern(100_000)).start();
    // Nothing of the replaced response is left.
    let request = "GET /zip/big?pool=two HTTP/1.1\r\nHost: h\r\nAccept-Encoding: gzip\r\n\r\n";
    let response = server.connect().ask(request);
    assert_eq!((response.status, response.header("Content-Encoding")), (500, None));
    let response = server.get("/variable/big?pool=two");
    assert_eq!(response.status, 500);
    assert!(response.text().contains("500 Internal Server Error"));
    server.wait_logged("[error]");
    server.wait_logged("thread pool \"two\" not found");
    assert!(server.get("/variable/big?pool=default").body == pattern(100_000));
    server.stop();
}

fn full_pool_refuses_only_files_not_in_memory(driver: Driver) {
    let text = "location /none/ { alias %DIR%/files/; aio threads=none;
            location /none/zip/ { alias %DIR%/files/; gzip on; gzip_types *; }
            location /none/page/ { alias %DIR%/files/; error_page 503 @busy; }
            location /none/circle/ { alias %DIR%/files/; recursive_error_pages on; error_page 503 $uri; } }
        location @busy { return 503 busy; }
        location = /hold { test_pool none %DIR%/gate; }";
    let setup = setup(driver, text).replace("worker_processes 2;", "worker_processes 1;");
    let server = setup.file("files/hot", "hot").file("files/cold", pattern(200_000)).start();
    let gate_path = server.directory.path().join("gate");
    let gate = UnixListener::bind(&gate_path).expect("a socket");
    std::fs::set_permissions(&gate_path, PermissionsExt::from_mode(0o777)).expect("ours");
    assert_eq!(server.get("/none/hot").text(), "hot");
    let mut held = server.connect();
    held.send("GET /hold HTTP/1.1\r\nHost: h\r\n\r\n");
    let (task, _) = gate.accept().expect("a task");
    let files = server.directory.path().join("files");
    if !can_evict(&files.join("cold")) {
        return skip("nothing can be evicted from memory here");
    }
    // Nothing of the intended response is left.
    let (mut refused, response, path) = refusal(&server, "/none/cold", "");
    assert_eq!((response.status, response.header("Last-Modified"), response.header("ETag")), (503, None, None));
    assert!(response.text().contains("503 Service Temporarily Unavailable"));
    let line = server.wait_logged(&format!("request: \"GET {path} HTTP/1.1\""));
    assert!(
        line.contains("[error]") && line.contains("thread pool \"none\" queue overflow: 0 tasks waiting"),
        "{line}"
    );
    assert_eq!(refused.get("/none/hot").text(), "hot", "on the same connection");
    // Input of compression is read in the pool, too.
    let (_, response, _) = refusal(&server, "/none/zip/zipped", "Accept-Encoding: gzip\r\n");
    assert_eq!((response.status, response.header("Content-Encoding")), (503, None));
    // A status of the server's own is answered as any other, and an error page that cannot be read ends as well.
    let (_, response, _) = refusal(&server, "/none/page/page", "");
    assert_eq!((response.status, response.text()), (503, "busy"));
    let (_, response, _) = refusal(&server, "/none/circle/circle", "");
    assert!(matches!(response.status, 500 | 503));
    // A response that has begun can only break off.
    let breaks_off = |number: usize| {
        let name = format!("begun{number}");
        write_cold(&files.join(&name));
        read_beginning(&files.join(&name), 65_536);
        let mut begun = server.connect();
        begun.send(format!("GET /none/{name} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
        assert_eq!(begun.head().header("Content-Length"), Some("200000"));
        let received = begun.read_to_end();
        assert!(pattern(200_000).starts_with(&received), "{}", received.len());
        received.len() < 200_000
    };
    assert!((0..TRIES).any(breaks_off), "a full pool delays nothing");
    assert_eq!(server.get("/none/hot").text(), "hot");
    drop(task);
    assert_eq!(held.response().text(), "done");
    server.directory.wait_until("a free thread", |_| {
        let pools = server.get("/pools").text().to_owned();
        pools.lines().any(|line| line.starts_with("none ") && line.contains("running=0"))
    });
    assert!(server.get(&path).body == pattern(200_000));
    server.stop();
}

/// Most files requested until one is still not in memory at the second check.
const TRIES: usize = 100;

/// Writes a file of 200,000 bytes and evicts it.
fn write_cold(path: &Path) {
    std::fs::write(path, pattern(200_000)).expect("written");
    File::open(path).and_then(|file| file.sync_all()).expect("on the disk");
    evict_whole(path);
}

/// Requests files that are not in memory until one needs the pool; returns the connection, the response and the path.
/// Each request has a file of its own: the first check starts a read, and a fast disk may finish before the check ends.
#[track_caller]
fn refusal(server: &Server, path: &str, fields: &str) -> (Client, Response, String) {
    let name = path.rsplit('/').next().expect("a name");
    let refused = (0..TRIES).find_map(|number| {
        write_cold(&server.directory.path().join(format!("files/{name}{number}")));
        let mut client = server.connect();
        client.send(format!("GET {path}{number} HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
        let mut response = client.head();
        if response.status == 200 {
            return None;
        }
        // The error page or a part of it has been read meanwhile.
        let length = response.header("Content-Length").expect("a page").parse().expect("a number");
        if length < 200_000 {
            response.body = client.take(length);
        }
        Some((client, response, format!("{path}{number}")))
    });
    refused.expect("a full pool refuses something")
}

fn fifos_and_sockets_are_never_waited_for(driver: Driver) {
    let server = setup(driver, "location / { root %DIR%/files; }").file("files/x", "x").start();
    let directory = server.directory.path().join("files");
    let mode = Mode::from_raw_mode(0o666);
    rustix::fs::mknodat(CWD, directory.join("fifo"), FileType::Fifo, mode, 0).expect("a FIFO");
    let _socket = UnixListener::bind(directory.join("socket")).expect("a socket");
    let mut client = server.connect();
    assert_eq!(client.get("/fifo").status, 404);
    assert!(matches!(client.get("/socket").status, 404 | 500));
    assert_eq!(server.get("/x").text(), "x");
    // /dev/zero is an endless device.
    let device = rustix::fs::makedev(1, 5);
    if rustix::fs::mknodat(CWD, directory.join("device"), FileType::CharacterDevice, mode, device).is_ok() {
        assert!(matches!(server.get("/device").status, 403 | 404));
    } else {
        skip("no device can be made here");
    }
    server.directory.write("files/directory/file", "x");
    assert_eq!(server.get("/directory").status, 301);
    server.end_with_alerts();
}

/// Ends tests that request files which cannot be opened: the log has `crit`, and nothing more severe.
trait EndWithAlerts {
    fn end_with_alerts(self);
}

impl EndWithAlerts for Server {
    fn end_with_alerts(mut self) {
        assert!(!self.log().contains("panicked"), "{self}");
        self.end(Signal::TERM);
    }
}

fn unprivileged_worker_serves_readable_files(driver: Driver) {
    if !is_root() {
        return skip("only root has files that others do not own");
    }
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let group = if groups.lines().any(|line| line.starts_with("nogroup:")) { "nogroup" } else { "nobody" };
    let setup =
        setup(driver, &ways("%DIR%/files")).replace("daemon off;", &format!("daemon off; user nobody {group};"));
    let server = setup.file("files/secret", "secret").start();
    let directory = server.directory.path().join("files");
    std::fs::set_permissions(directory.join("secret"), PermissionsExt::from_mode(0o600)).expect("ours");
    assert_eq!(server.get("/auto/secret").status, 403);
    check_all(&server, &directory);
    server.stop();
}

/// A mounted file system in an image file, or one without a device.
struct Mounted {
    directory: Directory,
}

impl Mounted {
    fn point(&self) -> PathBuf {
        self.directory.path().join("point")
    }

    /// Mounts it with these options of mount(8). Fails with the reason why it cannot be mounted.
    fn new(kind: &str, options: &str) -> Result<Mounted, String> {
        let directory = Directory::new();
        let mounted = Mounted { directory };
        std::fs::create_dir(mounted.point()).expect("ours");
        let path = |name: &str| mounted.directory.path().join(name);
        let text = |error: rustix::io::Errno| format!("mount: {error}");
        match kind {
            "tmpfs" => {
                rustix::mount::mount("tmpfs", mounted.point(), "tmpfs", MountFlags::empty(), None).map_err(text)?;
            }
            "overlay" => {
                for name in ["lower", "upper", "work"] {
                    std::fs::create_dir(path(name)).expect("ours");
                }
                let options = format!(
                    "lowerdir={},upperdir={},workdir={}",
                    path("lower").display(),
                    path("upper").display(),
                    path("work").display()
                );
                let options = std::ffi::CString::new(options).expect("without NUL");
                rustix::mount::mount("overlay", mounted.point(), "overlay", MountFlags::empty(), Some(&*options))
                    .map_err(text)?;
            }
            kind => {
                let image = File::create(path("image")).expect("ours");
                image.set_len(400 << 20).expect("a sparse file");
                run(Command::new(format!("mkfs.{kind}")).arg("-q").arg(path("image")))?;
                let options = format!("loop,{options}");
                run(Command::new("mount").args(["-o", &options]).arg(path("image")).arg(mounted.point()))?;
            }
        }
        Ok(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.point(), UnmountFlags::DETACH);
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(format!("{command:?}: {error}")),
    }
}

/// Mounts it; skips and returns `None` where that is impossible.
fn mount_or_skip(kind: &str, options: &str) -> Option<Mounted> {
    Mounted::new(kind, options)
        .inspect_err(|error| {
            eprintln!("mount -t {kind} -o {options}: {error}");
            skip(format!("{kind} cannot be mounted here"));
        })
        .ok()
}

fn every_file_system_delivers_the_same(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    for kind in ["tmpfs", "overlay", "ext4", "xfs", "btrfs"] {
        let Some(mounted) = mount_or_skip(kind, "defaults") else { continue };
        let root = mounted.point();
        let server = setup(driver, &ways(root.to_str().expect("text"))).start();
        check_all(&server, &root);
        server.stop();
        eprintln!("{kind} delivers");
    }
}

/// The disk is found by the mount table, which has another device number for btrfs.
fn a_disk_has_the_number_of_its_files(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    for kind in ["ext4", "xfs", "btrfs"] {
        let Some(mounted) = mount_or_skip(kind, "defaults") else { continue };
        let point = mounted.point();
        write_unread(&point.join("file"), 300_001);
        evict(&point.join("file"));
        let locations = format!("root {}; location /api/ {{ api; }}", point.display());
        let server = setup(driver, &locations).start();
        assert!(server.get("/file").body == pattern(300_001));
        let devices = server.get("/api/9/gale/devices").text().to_owned();
        assert!(devices.contains(&format!("\"mounted_on\":\"{}\"", point.display())), "{kind}: {devices}");
        server.stop();
        eprintln!("{kind} is known");
    }
}

/// Reads of a cached file that are left to a thread because they write its time of access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LeftToThreads {
    None,
    /// The first read after a change.
    First,
    All,
}

/// File systems and mount options. btrfs writes each time at once, whatever `lazytime` says.
const MOUNTS: &[(&str, &str, LeftToThreads)] = &[
    ("ext4", "relatime", LeftToThreads::First),
    ("ext4", "noatime", LeftToThreads::None),
    ("ext4", "strictatime", LeftToThreads::All),
    ("ext4", "strictatime,lazytime", LeftToThreads::None),
    ("xfs", "relatime", LeftToThreads::First),
    ("xfs", "noatime", LeftToThreads::None),
    ("xfs", "strictatime", LeftToThreads::All),
    ("xfs", "relatime,lazytime", LeftToThreads::None),
    ("btrfs", "relatime", LeftToThreads::First),
    ("btrfs", "noatime", LeftToThreads::None),
    ("btrfs", "strictatime", LeftToThreads::All),
    ("btrfs", "strictatime,lazytime", LeftToThreads::All),
];

fn a_mount_says_which_reads_are_left_to_threads(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    for &(kind, options, left) in MOUNTS {
        let Some(mounted) = mount_or_skip(kind, options) else { continue };
        let root = mounted.point();
        let server = setup(driver, &ways(root.to_str().expect("text"))).start();
        for way in ["auto", "auto_sendfile", "threads", "on", "ahead"] {
            check_time_of_access(&server, &root.join(way), way, left, &format!("{kind}, {options}"));
        }
        // Reads of the ring write it, too, and on the loop if the data are cached.
        let path = root.join("cold");
        write_unread(&path, 1 << 20);
        for way in ["on", "on_sendfile", "direct_on"] {
            evict(&path);
            make_unread(&path);
            let figures = Figures::of(&server);
            assert!(server.get(&format!("/{way}/cold")).body == pattern(1 << 20), "{kind}, {options}, {way}");
            let delta = figures.until_now(&server);
            // btrfs treats a direct read as another one.
            let writes_all = left == LeftToThreads::All && (kind, way) != ("btrfs", "direct_on");
            let may_use_ring = driver == Driver::IoUring && !writes_all;
            assert!(may_use_ring || delta("io_uring") == 0, "{kind}, {options}, {way}\n{server}");
            // Direct reads do not check the page cache first.
            let is_first_a_threads = way != "direct_on" || left != LeftToThreads::First || delta("pool") > 0;
            assert!(is_first_a_threads, "{kind}, {options}, {way}\n{server}");
            if delta("io_uring") + delta("pool") + delta("probe_misses") == 0 {
                eprintln!("{kind}, {options}, {way}: the kernel has not let go of the file, so nothing was tried");
            }
        }
        server.stop();
        eprintln!("{kind}, {options}: as it says");
    }
}

/// Checks a cached file that was not read since its change: how the first and the later reads are done, and its time of
/// access afterwards.
fn check_time_of_access(server: &Server, path: &Path, way: &str, left: LeftToThreads, mount: &str) {
    let size = 300_001;
    write_unread(path, size);
    let uri = format!("/{way}/{way}");
    for is_first in [true, false] {
        let (before, figures) = (accessed(path), Figures::of(server));
        assert!(server.get(&uri).body == pattern(size), "{mount}, {uri}");
        let delta = figures.until_now(server);
        let (unlooked, pieces) = (delta("unlooked"), delta("pool") + delta("read") + delta("sendfile"));
        let expected = match left {
            LeftToThreads::All => unlooked == pieces,
            LeftToThreads::First => unlooked == u64::from(is_first),
            LeftToThreads::None => unlooked == 0,
        };
        assert!(expected, "{mount}, {uri}, first: {is_first}, {unlooked} of {pieces}\n{server}");
        assert_eq!((delta("io_uring"), delta("blocking")), (0, 0), "{mount}, {uri}");
        let is_written = if is_first { !mount.contains("noatime") } else { mount.contains("strictatime") };
        assert_eq!(accessed(path) > before, is_written, "{mount}, {uri}, first: {is_first}");
        wait_for_another_tick(accessed(path));
    }
}

/// Counters at one moment.
struct Figures(String);

impl Figures {
    fn of(server: &Server) -> Figures {
        Figures(server.get("/files").text().to_owned())
    }

    fn until_now(self, server: &Server) -> impl Fn(&str) -> u64 {
        let now = Figures::of(server);
        move |name: &str| figure(&now.0, name) - figure(&self.0, name)
    }
}

/// Writes a file to the disk without reading it; the clock of its file system has advanced since.
fn write_unread(path: &Path, size: usize) {
    std::fs::write(path, pattern(size)).expect("written");
    make_unread(path);
    File::open(path).and_then(|file| file.sync_all()).expect("on the disk");
}

fn make_unread(path: &Path) {
    let file = File::open(path).expect("there");
    file.set_times(FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH)).expect("ours");
    let metadata = file.metadata().expect("there");
    wait_for_another_tick((metadata.ctime(), metadata.ctime_nsec()));
}

fn accessed(path: &Path) -> (i64, i64) {
    std::fs::metadata(path).map(|file| (file.atime(), file.atime_nsec())).expect("there")
}

/// Waits for the next tick of the file system's clock; all changes before it get the same time.
fn wait_for_another_tick(time: (i64, i64)) {
    let tick = || rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    while (tick().tv_sec, tick().tv_nsec) <= time {}
}

/// Locations that read from a file system in user space; its hanging files take at most half of a pool.
fn broken(driver: Driver, root: &Path) -> Server {
    let root = root.to_str().expect("text");
    let text = format!("{} location /alive/ {{ alias %DIR%/files/; }}", ways(root));
    let setup = setup(driver, &text).replace("daemon off;", "daemon off; thread_pool default threads=2;");
    setup.file("files/cold", pattern(300_000)).start()
}

fn broken_file_system_delays_only_its_own_requests(driver: Driver) {
    let Some(mounted) = mount_alone() else { return };
    let server = broken(driver, &mounted.point());
    let content = fuse::content();
    // `aio off` exists to show what happens without threads.
    for (way, _) in WAYS.iter().filter(|(way, _)| !way.contains("off")) {
        let mut client = server.connect();
        for _ in 0..2 {
            assert!(client.get(&format!("/{way}/good?pool=one")).body == content, "{way}");
        }
        for name in ["eio", "short"] {
            let mut client = server.connect();
            client.send(format!("GET /{way}/{name}?pool=one HTTP/1.1\r\nHost: h\r\n\r\n"));
            let all = client.read_to_end();
            if name == "eio" && all.is_empty() {
                // The kernel has read the first piece ahead together with the failing part.
                continue;
            }
            let end = all.windows(4).position(|window| window == b"\r\n\r\n").expect("a head") + 4;
            let (head, received) = (String::from_utf8_lossy(&all[..end]), &all[end..]);
            assert!(head.contains(&format!("Content-Length: {}\r\n", fuse::SIZE)), "{way}: {head}");
            // Never more than announced, never other bytes in place of missing ones, and then the end.
            assert!(received.len() <= fuse::MIDDLE && content.starts_with(received), "{way} {name}");
        }
        assert_eq!(server.get(&format!("/{way}/missing")).status, 404);
    }
    let count = WAYS.iter().filter(|(way, _)| !way.contains("off")).count();
    server.wait_logged_times("/short\" was truncated at ", count);
    server.wait_logged_times("/eio\" failed (5: Input/output error)", count);
    server.end_with_alerts();
}

fn reads_that_never_end_delay_no_other_requests(driver: Driver) {
    let Some(mounted) = mount_alone() else { return };
    let server = broken(driver, &mounted.point());
    let path = server.directory.path().join("files/cold");
    // More than there are threads, by all methods.
    let ask = |number: usize| -> Client {
        let mut client = server.connect();
        let way = ["auto", "on", "threads", "direct"][number % 4];
        client.send(format!("GET /{way}/hangs{number} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
        client
    };
    let mut stuck: Vec<Client> = (0..12).map(ask).collect();
    // Two threads for each of two loops; later opens wait, too.
    server.directory.wait_until("file system that does not answer", |_| {
        server.get("/pools").text().lines().any(|line| line.starts_with("default ") && line.contains("running=4"))
    });
    for _ in 0..10 {
        evict(&path);
        assert!(server.get("/alive/cold").body == pattern(300_000));
        assert_eq!(server.get("/quick").text(), "quick");
    }
    stuck.truncate(6);
    assert_eq!(server.get("/quick").text(), "quick");
    // The kernel does not cancel operations that the file system has received: the process stays until they are
    // answered.
    drop(mounted);
    for client in &mut stuck {
        // Responses that were being sent break off; the other requests fail because their file cannot be opened.
        assert!(client.read_to_end().len() < fuse::SIZE);
    }
    server.end_with_alerts();
}

/// A thread of a pool waits for a hanging file, or a whole event loop.
const WAITING: [&str; 2] = ["auto", "off"];

/// The kernel cannot end a waiting thread, but the server can end without it.
fn nor_do_they_hold_up_the_end_of_the_server(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    for (signal, way) in [Signal::TERM, Signal::QUIT].into_iter().flat_map(|signal| WAITING.map(|way| (signal, way))) {
        let Some(mounted) = fuse::FileSystem::mount() else { return };
        // A graceful stop waits for clients.
        let mut server = hanging(driver, &mounted, "worker_shutdown_timeout 1s;").start();
        let _client = request_hanging_file(&server, &mounted, way);
        let (address, worker) = (server.directory.address(1), server.worker());
        server.signal(signal);
        assert!(server.wait_exited().success(), "{server}");
        assert!(
            server.log().contains(&format!(
                "worker process {worker} has not exited within 3 seconds, the kernel holds its thread \""
            )),
            "{server}"
        );
        // The address is free for another server.
        drop(std::net::TcpListener::bind(address).unwrap_or_else(|error| panic!("{way}: {error}")));
        drop(mounted);
        server.assert_nothing_left();
    }
}

/// The dead process does not end, and the kernel closes none of its descriptors.
fn hanging_reads_do_not_delay_the_successor_of_a_dead_worker(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    // One death has a core dump, in which all threads take part. Then either the file system or the server ends first.
    let deaths = [
        (Signal::KILL, "auto", "within a second, ", None),
        (Signal::KILL, "off", "within a second, ", Some(Signal::TERM)),
        (Signal::ABORT, "auto", "within a second, it is dumping core, ", Some(Signal::QUIT)),
    ];
    for (signal, way, how, stop) in deaths {
        let Some(mounted) = fuse::FileSystem::mount() else { return };
        let mut server = hanging(driver, &mounted, "").start();
        let _client = request_hanging_file(&server, &mounted, way);
        let worker = server.worker();
        rustix::process::kill_process(worker, signal).expect("it runs");
        let alert = server.wait_logged(&format!("worker process {worker} has died, but has not exited "));
        let (what, threads) = alert.split_once("the kernel holds its thread \"").expect("which");
        assert!(
            what.ends_with(how) && threads.ends_with("a file system that does not respond; not waiting any longer")
        );
        // One by one: the kernel delivers some connections to loops of the dead process.
        for _ in 0..4 {
            assert_eq!(server.connect_tcp(1).get("/quick").text(), "quick");
        }
        let configuration = server.directory.read("gale.conf");
        server.reload(&configuration.replace("200 quick", "200 again"));
        assert_eq!(server.get("/quick").text(), "again");
        if let Some(stop) = stop {
            // The end of the server does not wait for it, either, and frees the address.
            let address = server.directory.address(1);
            server.signal(stop);
            assert!(server.wait_exited().success(), "{server}");
            drop(std::net::TcpListener::bind(address).expect("free"));
            drop(mounted);
            server.assert_nothing_left();
            continue;
        }
        drop(mounted);
        server.wait_logged(&format!("worker process {worker} exited on signal {}", signal.as_raw()));
        assert_eq!(server.get("/quick").text(), "again");
        server.end(Signal::TERM);
    }
}

/// The dead process holds all sockets, and the server ends only after its last client.
fn nor_do_they_keep_an_address_when_the_server_waits_for_a_client(driver: Driver) {
    let Some(mounted) = mount_alone() else {
        return;
    };
    let mut server = hanging(driver, &mounted, "").start();
    let _client = request_hanging_file(&server, &mounted, "auto");
    let worker = server.worker();
    rustix::process::kill_process(worker, Signal::KILL).expect("it runs");
    server.wait_logged(&format!("worker process {worker} has died, but has not exited "));
    let mut busy = server.connect();
    // The second request arrives with the first and has begun when the first is answered.
    busy.send("GET /quick HTTP/1.1\r\nHost: h\r\n\r\nGET /quick HTTP/1.1\r\nHost: h\r\n");
    assert_eq!(busy.response().text(), "quick");
    server.signal(Signal::QUIT);
    let address = server.directory.address(1);
    let other = bind_when_free(address);
    assert!(!server.directory.path().join("gale.sock").exists());
    // A socket file of another server.
    let other_file = UnixListener::bind(server.directory.path().join("gale.sock")).expect("nobody is in the way");
    busy.send("\r\n");
    assert_eq!(busy.response().text(), "quick");
    assert!(server.wait_exited().success(), "{server}");
    assert!(server.directory.path().join("gale.sock").exists(), "not the old server's to remove");
    drop((other, other_file, mounted));
    std::fs::remove_file(server.directory.path().join("gale.sock")).expect("ours");
    server.assert_nothing_left();
}

/// The worker has closed nothing: one of its loops was stuck.
fn nor_does_a_worker_keep_an_address_that_died_in_a_graceful_stop(driver: Driver) {
    let Some(mounted) = mount_alone() else {
        return;
    };
    let mut server = hanging(driver, &mounted, "").start();
    let _client = request_hanging_file(&server, &mounted, "off");
    let (address, worker) = (server.directory.address(1), server.worker());
    server.signal(Signal::QUIT);
    server.wait_logged("gracefully shutting down");
    rustix::process::kill_process(worker, Signal::KILL).expect("it runs");
    assert!(server.wait_exited().success(), "{server}");
    assert!(server.log().contains(&format!("worker process {worker} has died, but has not exited ")), "{server}");
    drop(std::net::TcpListener::bind(address).expect("free"));
    drop(mounted);
    server.assert_nothing_left();
}

/// The new binary knows of the dead process: its own worker takes the connections that the kernel delivers to the dead
/// one, and the address is free when it ends.
fn nor_does_one_that_an_old_binary_has_left_behind(driver: Driver) {
    let Some(mounted) = mount_alone() else { return };
    let mut server = hanging(driver, &mounted, "").start();
    let _client = request_hanging_file(&server, &mounted, "auto");
    let (address, old, worker) = (server.directory.address(1), server.pid(), server.worker());
    rustix::process::kill_process(worker, Signal::KILL).expect("it runs");
    server.wait_logged(&format!("worker process {worker} has died, but has not exited "));
    assert_eq!(server.get("/quick").text(), "quick");
    rustix::process::kill_process(old, Signal::USR2).expect("it runs");
    server.wait_notified("READY=1");
    let new = server.pid_in_file();
    rustix::process::kill_process(old, Signal::QUIT).expect("it runs");
    assert!(server.wait_exited().success(), "{server}");
    for _ in 0..4 {
        assert_eq!(server.connect_tcp(1).get("/quick").text(), "quick");
    }
    rustix::process::kill_process(new, Signal::QUIT).expect("it runs");
    assert!(wait_ended(new), "{server}");
    drop(std::net::TcpListener::bind(address).expect("free"));
    drop(mounted);
    server.assert_nothing_left();
}

/// Mounts a file system that only this test sees; `None` where that is impossible.
fn mount_alone() -> Option<fuse::FileSystem> {
    if has_own_mounts() { fuse::FileSystem::mount() } else { None }
}

/// Binds the address as soon as it is free. Polls, because there is no notification.
fn bind_when_free(address: std::net::SocketAddr) -> std::net::TcpListener {
    let end = std::time::Instant::now() + DEADLINE;
    loop {
        match std::net::TcpListener::bind(address) {
            Ok(listener) => return listener,
            Err(error) => assert!(std::time::Instant::now() < end, "{address}: {error}"),
        }
        std::thread::yield_now();
    }
}

/// With `aio off` a request for the file blocks its loop: that is what the setting shows. Other loops go on.
fn a_reload_goes_on_without_a_loop_that_waits_for_ever(driver: Driver) {
    let Some(mounted) = mount_alone() else { return };
    let mut server = hanging(driver, &mounted, "").start();
    let mut client = request_hanging_file(&server, &mounted, "off");
    let configuration = server.directory.read("gale.conf");
    server.reload(&configuration.replace("200 quick", "200 again"));
    server.wait_logged("is stuck, going on without it");
    for _ in 0..4 {
        assert_eq!(server.get("/quick").text(), "again");
    }
    drop(mounted);
    assert!(client.read_to_end().len() < fuse::SIZE);
    for _ in 0..4 {
        assert_eq!(server.get("/quick").text(), "again");
    }
    server.end_with_alerts();
}

/// A server for the files of a broken file system, on two addresses.
fn hanging(driver: Driver, mounted: &fuse::FileSystem, more: &str) -> Setup {
    let text = format!("listen %TCP%; {}", ways(mounted.point().to_str().expect("text")));
    setup(driver, &text).replace("daemon off;", &format!("daemon off; {more}"))
}

/// A client that waits for ever; its request has reached the file system.
fn request_hanging_file(server: &Server, mounted: &fuse::FileSystem, way: &str) -> Client {
    let mut client = server.connect();
    client.send(format!("GET /{way}/hangs HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
    mounted.wait_hanging();
    client
}
