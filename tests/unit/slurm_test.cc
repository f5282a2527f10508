// Where the ranks of a Slurm step meet.
#include "core/group/slurm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tests/support/variables.h"

namespace sotto {
namespace {

using test::environment_of;
using testing::HasSubstr;

TEST(Slurm, TheFirstHostOfAList) {
  struct Case {
    const char* list;
    const char* first;
    bool several;
  };
  for (const Case& c : {Case{"node", "node", false},
                        {"10.0.0.1", "10.0.0.1", false},
                        {"node7", "node7", false},
                        {"node[7]", "node7", false},
                        {"a,b", "a", true},
                        {"node[01-03,7],other5", "node01", true},
                        {"node[3,1-2]", "node3", true},
                        {"node[08-12]-ib", "node08-ib", true},
                        {"rack[1-2]node[00-31]", "rack1node00", true},
                        {"gpu_a-1.cluster,node[1-2]", "gpu_a-1.cluster", true},
                        {"node[99-100]", "node99", true},
                        {"node[3-3]", "node3", true}}) {
    SCOPED_TRACE(c.list);
    const Result<SlurmHosts> hosts = slurm_hosts("SLURM_STEP_NODELIST", c.list);
    ASSERT_TRUE(hosts.ok()) << hosts.status().text();
    EXPECT_EQ(hosts->first, c.first);
    EXPECT_EQ(hosts->several, c.several);
  }
}

TEST(Slurm, ABadListIsNamedWithThePlaceThatIsWrong) {
  struct Case {
    const char* list;
    const char* wrong;
  };
  for (const Case& c :
       {Case{"", "is \"\": a host is expected at character 1;"},
        {",a", "a host is expected at character 1;"},
        {"a,", "a host is expected at character 3;"},
        {"a,,b", "a host is expected at character 3;"},
        {"a b", "a \",\" or the end is expected at character 2;"},
        {"a]", "a \",\" or the end is expected at character 2;"},
        {"a[", "a number is expected at character 3;"},
        {"a[]", "a number is expected at character 3;"},
        {"a[1", "\"-\", \",\" or \"]\" is expected at character 4;"},
        {"a[1-]", "a number is expected at character 5;"},
        {"a[1,]", "a number is expected at character 5;"},
        {"a[x]", "a number is expected at character 3;"},
        {"a[1-2-3]", "\"-\", \",\" or \"]\" is expected at character 6;"},
        {"a[5-3]", "a number from 5 on before this place is expected at character 6;"},
        {"a[10-9]", "a number from 10 on before this place"},
        {"good,bad[", "a number is expected at character 10;"},
        {"a\n", "is \"a\\x0a\": a \",\" or the end"}}) {
    SCOPED_TRACE(c.list);
    const Status status = slurm_hosts("SLURM_JOB_NODELIST", c.list).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.text(), HasSubstr("environment variable SLURM_JOB_NODELIST is \""));
    EXPECT_THAT(status.text(), HasSubstr(c.wrong));
    EXPECT_THAT(status.text(), HasSubstr("looks like node[01-03,7],other5"));
  }
}

TEST(Slurm, PortsOfJobsAndSteps) {
  EXPECT_EQ(slurm_port(0, 0), 20000);
  EXPECT_EQ(slurm_port(1, 0), 20016);
  EXPECT_EQ(slurm_port(1, 3), 20019);
  EXPECT_EQ(slurm_port(625, 0), 20000);
  EXPECT_EQ(slurm_port(624, 15), 29999);
  EXPECT_EQ(slurm_port(UINT32_MAX, UINT32_MAX), 20000 + (7295 * 16 + 7295) % 10000);
}

TEST(Slurm, AddressOfAStep) {
  std::map<std::string, std::string> variables{{"SLURM_STEP_NODELIST", "n[2-3]"},
                                               {"SLURM_JOB_NODELIST", "n[1-3]"},
                                               {"SLURM_JOB_ID", "77"},
                                               {"SLURM_STEP_ID", "2"}};
  const SlurmPlace step = slurm_place(environment_of(variables)).take();
  EXPECT_EQ(step.address, "tcp://n2:21234");
  EXPECT_TRUE(step.several_hosts);
  variables.erase("SLURM_STEP_NODELIST");
  variables.erase("SLURM_STEP_ID");
  variables["SLURM_JOB_NODELIST"] = "n1";
  const SlurmPlace job = slurm_place(environment_of(variables)).take();
  EXPECT_EQ(job.address, "tcp://n1:21232");
  EXPECT_FALSE(job.several_hosts);
}

TEST(Slurm, WhatIsMissingOrNoNumberIsNamed) {
  const auto text = [](std::map<std::string, std::string> variables) {
    const Status status = slurm_place(environment_of(std::move(variables))).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.text();
  };
  EXPECT_THAT(text({{"SLURM_JOB_ID", "1"}}),
              HasSubstr("but not SLURM_STEP_NODELIST or SLURM_JOB_NODELIST,"));
  EXPECT_THAT(text({{"SLURM_JOB_NODELIST", "a"}}), HasSubstr("but not SLURM_JOB_ID,"));
  EXPECT_THAT(text({{"SLURM_JOB_NODELIST", "a"}, {"SLURM_JOB_ID", "1_2"}}),
              HasSubstr("SLURM_JOB_ID is \"1_2\"; allowed: a whole number 0 to 4294967295"));
  EXPECT_THAT(
      text({{"SLURM_JOB_NODELIST", "a"}, {"SLURM_JOB_ID", "1"}, {"SLURM_STEP_ID", "batch"}}),
      HasSubstr("SLURM_STEP_ID is \"batch\""));
}

}  // namespace
}  // namespace sotto
