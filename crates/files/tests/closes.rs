//! Closing files: a pool thread does it if it may wait, on whatever thread the last handle is dropped. A program of its
//! own, because it needs the default pool for itself.

#[path = "../../runtime/tests/common/mod.rs"]
mod common;

#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc;
use std::thread;

use common::*;
use gale_files::{self as files, File, OpenFlags};
use gale_runtime::{Device, default_pool};

#[test]
fn a_thread_that_is_of_no_pool_does_not_wait_for_a_close() {
    let directory = Directory::new();
    let path = directory.file("large", &pattern(1 << 20));
    let open = || files::open_blocking(&path, OpenFlags::READ).unwrap();
    let descriptor_of = |file: &File| format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    let named = open();
    let descriptor = descriptor_of(&named);
    drop(named);
    assert!(!std::fs::exists(&descriptor).unwrap(), "a file that has its name is closed at once");
    let unlinkable = open();
    unlinkable.close_in_pool();
    let file = open();
    let descriptors = [&unlinkable, &file].map(descriptor_of);
    default_pool().resize(1, 16);
    let (release, released) = mpsc::channel::<()>();
    default_pool().detach(Device::NONE, move || released.recv().expect("the test goes on")).unwrap();
    drop(unlinkable);
    std::fs::remove_file(&path).unwrap();
    drop(file);
    for descriptor in &descriptors {
        assert!(std::fs::exists(descriptor).unwrap(), "the pool is busy");
    }
    release.send(()).unwrap();
    for descriptor in &descriptors {
        while std::fs::read_link(descriptor).is_ok_and(|path| path.ends_with("large (deleted)")) {
            thread::yield_now();
        }
    }
}
