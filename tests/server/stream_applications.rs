//! Real servers behind `stream`, if Debian's packages are installed: PostgreSQL, also with TLS that is terminated by
//! it, and OpenSSH, whose session outlives a reload. Without a package its test is skipped with a message. (Redis is in
//! `stream.rs`, dnsmasq in `stream_udp.rs`.)

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::support::authority::Authority;
use crate::support::{
    self, Client, Directory, Driver, NOBODY, Setup, is_root, skip, stream_configuration, with_each_driver,
};

with_each_driver!(postgresql_is_served, postgresql_is_served_with_tls_of_its_own, a_session_of_ssh_outlives_a_reload,);

/// A program of a package; it ends with the test.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        // SIGQUIT makes the postmaster end its children at once; an SSH client or server just ends.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::QUIT);
        let _ = self.0.wait();
    }
}

impl Program {
    /// Starts a program, whose child may run as another user, and waits for a line of its standard error that contains
    /// `ready`.
    #[track_caller]
    fn start(command: &mut Command, ready: &str) -> Program {
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped"));
        let program = Program(child);
        let mut all = String::new();
        loop {
            let start = all.len();
            assert!(lines.read_line(&mut all).expect("text") > 0, "it ended: {all}");
            if all[start..].contains(ready) {
                break;
            }
        }
        // Later lines are read and dropped, so that the program never blocks on a full pipe.
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        program
    }
}

/// Paths of a package's programs in the first directory that has all of them.
fn find<const N: usize>(package: &str, directories: &[PathBuf], names: [&str; N]) -> Option<[PathBuf; N]> {
    let places = directories.iter().map(|directory| names.map(|name| directory.join(name)));
    let found = places.into_iter().find(|paths| paths.iter().all(|path| path.exists()));
    if found.is_none() {
        skip(format!("{package} is not installed"));
    }
    found
}

/// Directories of the server's programs, which Debian keeps apart by version; the newest first.
fn postgresql_directories() -> Vec<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut directories: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    directories.sort();
    directories.reverse();
    directories
}

/// A PostgreSQL server with a cluster of its own, as an unprivileged user: it refuses to run as root.
struct Postgresql {
    _server: Program,
    psql: PathBuf,
}

impl Postgresql {
    /// Starts a server at this address. Returns `None`, with a message, if PostgreSQL is not installed.
    fn start(own: &Directory, address: SocketAddr, authority: &Authority) -> Option<Postgresql> {
        let [initdb, postgres, psql] = find("postgresql", &postgresql_directories(), ["initdb", "postgres", "psql"])?;
        let data = own.path().join("data");
        fs::create_dir(&data).expect("a directory");
        fs::set_permissions(&data, Permissions::from_mode(0o700)).expect("ours");
        let pair = authority.ecdsa(&["database.test"]);
        own.write("server.pem", pair.certificate);
        own.write("server.key", pair.key);
        let key = own.path().join("server.key");
        fs::set_permissions(&key, Permissions::from_mode(0o600)).expect("ours");
        if is_root() {
            [&data, &key].into_iter().for_each(|path| chown(path, Some(NOBODY), Some(NOBODY)).expect("root may"));
        }
        let made = unprivileged(Command::new(initdb).args(["-U", "gale", "-A", "trust", "-N", "-D"]).arg(&data))
            .current_dir(own.path())
            .output()
            .expect("it starts");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut command = Command::new(postgres);
        command.arg("-D").arg(&data).args(["-h", &address.ip().to_string(), "-p", &address.port().to_string()]);
        let options = ["unix_socket_directories=", "fsync=off", "ssl=on", "ssl_cert_file=../server.pem"];
        for option in options.into_iter().chain(["ssl_key_file=../server.key", "lc_messages=C"]) {
            command.args(["-c", option]);
        }
        unprivileged(&mut command).current_dir(own.path());
        let server = Program::start(&mut command, "database system is ready to accept connections");
        Some(Postgresql { _server: server, psql })
    }

    /// Output of the client program for a statement sent to this address.
    #[track_caller]
    fn ask(&self, address: SocketAddr, options: &str, statement: &str) -> String {
        let connection = format!("host={} port={} user=gale dbname=postgres {options}", address.ip(), address.port());
        let output = Command::new(&self.psql)
            .args(["-X", "-A", "-t", "-q", "-d", &connection, "-c", statement])
            .env("HOME", "/nonexistent")
            .env("PGCONNECT_TIMEOUT", support::DEADLINE.as_secs().to_string())
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }
}

/// Sets an unprivileged user if the tests run as root.
fn unprivileged(command: &mut Command) -> &mut Command {
    if is_root() { command.uid(NOBODY).gid(NOBODY) } else { command }
}

fn postgresql_is_served(driver: Driver) {
    let text = "log_format line '$status $protocol'; server { listen %TCP%; proxy_pass %TCP2%; %LOG% }";
    let server = Setup::stream(driver, text).start();
    let own = Directory::new();
    let Some(database) = Postgresql::start(&own, server.directory.address(2), &Authority::new("Databases")) else {
        return;
    };
    let address = server.directory.address(1);
    let plain = "sslmode=disable";
    assert_eq!(database.ask(address, plain, "SELECT 6 * 7").trim(), "42");
    // A large result and a large statement.
    let rows = database.ask(address, plain, "SELECT repeat('x', 999) FROM generate_series(1, 20000)");
    assert_eq!(rows.len(), 20_000_000);
    let long = format!("SELECT length('{}')", "y".repeat(100_000));
    assert_eq!(database.ask(address, plain, &long).trim(), "100000");
    // One session without the client program: start-up, a query, the end.
    let mut client = Client::tcp(address);
    let parameters = b"\0\x03\0\0user\0gale\0database\0postgres\0\0";
    client.send([&((parameters.len() + 4) as u32).to_be_bytes()[..], parameters].concat());
    while take_message(&mut client).0 != b'Z' {}
    for round in 0..3 {
        let statement = format!("SELECT {round} + 1\0");
        client.send([b"Q", &((statement.len() + 4) as u32).to_be_bytes()[..], statement.as_bytes()].concat());
        assert_eq!(take_message(&mut client).0, b'T', "the columns");
        let (kind, row) = take_message(&mut client);
        assert_eq!((kind, row.last()), (b'D', Some(&(b'1' + round))), "{row:?}");
        assert_eq!((take_message(&mut client).0, take_message(&mut client).0), (b'C', b'Z'));
    }
    client.send(b"X\0\0\0\x04");
    client.assert_closed();
    server.directory.wait_line("access.log", "200 TCP");
    drop(database);
    server.stop();
}

/// Reads the type and the contents of a PostgreSQL message.
#[track_caller]
fn take_message(client: &mut Client) -> (u8, Vec<u8>) {
    let head = client.take(5);
    let length = u32::from_be_bytes(head[1..].try_into().expect("four bytes")) as usize;
    (head[0], client.take(length - 4))
}

/// The database terminates TLS and sends the certificate that the client verifies. (Up to version 16 a client first
/// asks for TLS in plaintext, so the session does not begin with the ClientHello.)
fn postgresql_is_served_with_tls_of_its_own(driver: Driver) {
    let text = "server { listen %TCP%; proxy_pass %TCP2%; proxy_half_close on; }";
    let server = Setup::stream(driver, text).start();
    let (own, authority) = (Directory::new(), Authority::new("Databases"));
    let Some(database) = Postgresql::start(&own, server.directory.address(2), &authority) else { return };
    own.write("authority.pem", &authority.pem);
    let roots = own.path().join("authority.pem");
    let options = format!("sslmode=verify-full host=database.test sslrootcert={}", roots.display());
    let address = server.directory.address(1);
    // `hostaddr` is the address to connect to, `host` the name in the certificate.
    let options = format!("hostaddr={} {options}", address.ip());
    let statement = "SELECT version FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    assert!(database.ask(address, &options, statement).starts_with("TLSv1."));
    let rows = database.ask(address, &options, "SELECT repeat('x', 999) FROM generate_series(1, 5000)");
    assert_eq!(rows.len(), 5_000_000);
    drop(database);
    server.stop();
}

fn a_session_of_ssh_outlives_a_reload(driver: Driver) {
    let directories = ["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from);
    let Some([sshd]) = find("openssh-server", &directories, ["sshd"]) else { return };
    let directories = ["/usr/bin", "/usr/local/bin"].map(PathBuf::from);
    let Some([ssh, keygen]) = find("openssh-client", &directories, ["ssh", "ssh-keygen"]) else { return };
    let may_mount = || Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success());
    if is_root() && !may_mount() {
        return skip("no mounts of one's own here, which sshd needs as root");
    }
    let text = stream_configuration(driver, "server { listen %TCP%; proxy_pass %TCP2%; }");
    let mut server = Setup::configuration(&text).start();
    let own = Directory::new();
    let path = |name: &str| own.path().join(name);
    for name in ["host", "client"] {
        let made = Command::new(&keygen).args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path(name)).output();
        assert!(made.expect("it starts").status.success());
    }
    fs::copy(path("client.pub"), path("authorized")).expect("a copy");
    let (front, behind) = (server.directory.address(1), server.directory.address(2));
    let configuration = format!(
        "ListenAddress {behind}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nStrictModes no\nUsePAM no\n\
         PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n",
        path("host").display(),
        path("authorized").display()
    );
    own.write("sshd_config", configuration);
    let mut command = if is_root() { Command::new("unshare") } else { Command::new(&sshd) };
    if is_root() {
        // sshd as root needs this directory, which Debian's service creates: in a private mount namespace, so nothing
        // is left.
        let script = "mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec \"$0\" \"$@\"";
        command.args(["--mount", "sh", "-c", script]).arg(&sshd);
    }
    command.args(["-D", "-e", "-f"]).arg(path("sshd_config"));
    let _sshd = Program::start(&mut command, "Server listening on");
    let host_key = fs::read_to_string(path("host.pub")).expect("a key");
    own.write("known", format!("[{}]:{} {host_key}", front.ip(), front.port()));
    let name = user_name();
    let session = Command::new(ssh)
        .args(["-F", "none", "-T", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "IdentityAgent=none"])
        .args(["-o", "StrictHostKeyChecking=yes", "-o", "GlobalKnownHostsFile=none", "-o"])
        .arg(format!("UserKnownHostsFile={}", path("known").display()))
        .arg("-i")
        .arg(path("client"))
        .args(["-p", &front.port().to_string(), &format!("{name}@{}", front.ip()), "exec cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut session = Program(session.expect("it starts"));
    let mut input = session.0.stdin.take().expect("piped");
    let mut output = session.0.stdout.take().expect("piped");
    let mut ask = |text: &[u8]| {
        input.write_all(text).expect("it takes it");
        let mut back = vec![0; text.len()];
        output.read_exact(&mut back).expect("it gives it back");
        assert!(back == text);
    };
    ask(b"before the reload\n");
    server.reload(&text);
    ask(b"after it\n");
    server.reload(&text.replace("worker_processes 2", "worker_processes 1"));
    // In pieces that fit into the pipes, since the test does not read while it writes.
    (0..64).for_each(|round| ask(&[round; 16 << 10]));
    drop(input);
    let status = session.0.wait().expect("it ends");
    assert!(status.success(), "{status}\n{server}");
    server.stop();
}

fn user_name() -> String {
    let output = Command::new("id").arg("-un").output().expect("it starts");
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}
